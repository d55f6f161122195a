"""Tokenizers of the kinds in use, made here: each has a few words, control tokens and an added token."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["the", "ferry", "quiet", "É", "猫", "no"]
ADDED = "<|späť|>"
"""No control token. Some of its characters stand for bytes in byte-level vocabularies, and some do not."""


def _bpe(alphabet: list[str], words: list[str], **how: object) -> Tokenizer:
    """A byte-pair encoding that merges each of the words from its left."""
    pieces, merges = dict.fromkeys([*alphabet, *"".join(words)]), []
    for word in words:
        for end in range(2, len(word) + 1):
            pieces[word[:end]] = None
            merges.append((word[: end - 1], word[end - 1]))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges)), **how))  # type: ignore[arg-type]


def _finished(inner: Tokenizer) -> Tokenizer:
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    inner.add_tokens([AddedToken(ADDED, normalized=False)])
    return inner


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every token is bytes, and merges end within characters."""
    inner = _bpe([*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())], ["Ġthe", "Ġferry", "Ġç", "Į«no"])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return _finished(inner)


def _sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    inner = _bpe(
        [*CONTROL, *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz"],
        [f"▁{word}" for word in WORDS],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    return inner


def llama2() -> Tokenizer:
    """As Llama 2: a blank in front of every text, which is cut off again, and bytes for what is rare."""
    inner = _sentencepiece(decoders.Strip(" ", 1, 0))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _finished(inner)


def gemma() -> Tokenizer:
    """As Gemma: no blank in front, and bytes for what is rare."""
    inner = _sentencepiece()
    inner.normalizer = normalizers.Replace(" ", "▁")
    return _finished(inner)


def metaspace() -> Tokenizer:
    """As T5: no bytes; the text is normalised, so that its tokens do not spell it."""
    pieces = [*CONTROL, "▁", *(f"▁{word}" for word in WORDS), "é", "y", "\ufffd", "▁\ufffd"]
    inner = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return _finished(inner)


def wordpiece() -> Tokenizer:
    """As BERT: the beginning of a word is written without a mark, and so is its blank."""
    pieces = [*CONTROL, *WORDS, "##s", "##y", "."]
    inner = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    return _finished(inner)


def without_decoder() -> Tokenizer:
    """Tokens are joined by blanks."""
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate([*CONTROL, *WORDS])}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(inner)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (byte_level, llama2, gemma, metaspace, wordpiece, without_decoder)
}
