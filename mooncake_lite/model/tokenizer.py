"""Text to token ids and back, and messages to text, by the files of a model folder.

Used by the gateway, the engine's callers and the command line; needs no torch. No code of a model
folder is ever run: the tokenizer is data, the template runs in a sandbox. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mooncake_lite.errors import ModelError, RequestError
from mooncake_lite.model.chat_template import ChatTemplate
from mooncake_lite.model.config import ModelConfig, load_config, read_json
from mooncake_lite.model.detokenizer import Detokenizer, OfBytes, OfTokens
from mooncake_lite.model.token_bytes import byte_alphabet, last_id, steps_of, token_bytes

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The calls for batches get one text each: without this they would start a thread per core for nothing."""

LONG_IDS = 256
"""More ids than this are decoded by the call for batches, which releases the interpreter's lock. Fewer take
less time than getting the lock back can."""

_BYTES = {character: byte for byte, character in enumerate(byte_alphabet())}
"""The byte that byte-level vocabularies write as this character."""


class Tokenizer:
    """The tokenizer of one model. Use `load_tokenizer`.

    eos_ids     token ids that end an answer, ascending
    vocab_size  rows of the model's embedding: the ids that the model knows are below it. The tokenizer may
                have fewer ids, or gaps between them
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos_ids: tuple[int, ...],
        template: ChatTemplate | None,
        vocab_size: int,
    ):
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._template = template
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        description = json.loads(inner.to_str())
        decoder = {step["type"] for step in steps_of(description.get("decoder"), "decoders")}
        self._is_bytes = "ByteLevel" in decoder and decoder <= {"ByteLevel", "Fuse"}
        self._fallback_bytes = _fallback_bytes(inner) if "ByteFallback" in decoder else {}
        self._token_bytes = token_bytes(description)
        self._last_id = last_id(description)
        self._special_ids = frozenset(
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        )

    def unembedded(self) -> dict[int, str]:
        """Return the tokens of which the model has no embedding, by id."""
        if self._last_id < self.vocab_size:
            return {}  # without the copy of all tokens
        return {i: token for token, i in self._inner.get_vocab().items() if i >= self.vocab_size}

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text. add_special_tokens adds what the model wants around a plain text (BOS);
        False for the text of a chat template, which has brought it along. Half of a surrogate pair, which
        JSON can carry but UTF-8 cannot, becomes "?". Other threads run meanwhile. Raises RequestError, with
        this `param`, for a text that the tokenizer cannot read, or of which the model lacks a token."""
        text = text.encode(errors="replace").decode()
        try:
            # encode() has the same result and keeps the interpreter's lock.
            ids = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":  # the library's own
                raise
            raise RequestError(f"the tokenizer cannot read this text: {error}", param=param) from None
        if (last := max(ids, default=0)) >= self.vocab_size:
            raise RequestError(
                f"the text has the token {self._inner.id_to_token(last)!r}, and its id {last} is not in the "
                f"model's vocabulary, 0 to {self.vocab_size - 1}",
                param=param,
            )
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that encode(text) is sure to have, by its length alone; 0 when there is none."""
        if self._token_bytes is None:
            return 0
        return self._token_bytes.fewest_tokens(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know are left out."""
        if len(ids) > LONG_IDS:
            return self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt's text of a conversation: [{"role": ..., "content": ...}, ...]. Any other field of a
        message reaches the template too.

        Encode it with add_special_tokens=False. Raises RequestError when the model has no template or
        the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._template.render(messages, tools=None, documents=None, add_generation_prompt=True)

    def detokenizer(self, before: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh Detokenizer for one answer. before: the tokens where the answer's text goes on."""
        if self._is_bytes:
            return OfBytes(self, skip_special_tokens)
        return OfTokens(self, skip_special_tokens, before)

    def text_of(self, token_id: int, *, is_first: bool = False) -> str:
        """Text of one token, control tokens too, in the middle of a text or as its first one; U+FFFD for a
        part of a character."""
        ids = [token_id]
        if is_first or self._is_bytes:
            return self.decode(ids, skip_special_tokens=False)
        return self.decode(ids * 2, skip_special_tokens=False)[len(self.text_of(token_id, is_first=True)) :]

    def pieces(self, text: str, *, add_special_tokens: bool = True) -> list[str]:
        """The piece of a text for each token of encode(text); joined, they are the text. As in an answer, a
        character of several tokens belongs to the last one."""
        offsets = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0].offsets
        ends, later = [], len(text)
        for begin, end in reversed(offsets):  # tokens of no text, as BOS, have (0, 0)
            ends.append(min(end, later))
            later = min(later, begin) if begin < end else later
        ends = list(itertools.accumulate(reversed(ends), max))[:-1]
        return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)])]

    def name_of(self, token_id: int) -> str:
        """The token as tokenizer.json writes it; "" for ids that the tokenizer does not have."""
        return self._inner.id_to_token(token_id) or ""

    def spelled(self, token_id: int) -> bytes | None:
        """The bytes of a token, where tokens are bytes. They need not be whole characters."""
        if not self._is_bytes:
            return self._fallback_bytes.get(token_id)
        token = self.name_of(token_id)
        if _BYTES.keys() >= set(token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which decode leaves out unless told otherwise."""
        return token_id in self._special_ids


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer and chat template of a model folder.

    Raises ModelError when there is no tokenizer.json, one of the files is damaged, or the model has no
    embedding of tokens that ordinary text or every prompt has.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; save it with a fast tokenizer (transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        inner = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from None
    config = load_config(folder)
    eos_ids = _eos_ids(folder, inner, config)
    tokenizer = Tokenizer(inner, eos_ids, _load_template(folder), config.vocab_size)
    _check_ids(path, inner, tokenizer)
    return tokenizer


def _check_ids(path: Path, inner: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """Hold the ids of a tokenizer against the embedding. Raises ModelError.

    The ids of ordinary text, of what stands around every text, and of the chat template must be embedded. An
    added token that is not is refused in the prompts that have it: some published folders have an unused one.
    """
    if not inner.get_vocab_size():
        raise ModelError(f"{path} has no tokens; save the tokenizer of this model again")
    fix = f"(vocab_size={tokenizer.vocab_size} in config.json); use the tokenizer.json of this model"
    unembedded = tokenizer.unembedded()
    if ordinary := unembedded.keys() - inner.get_added_tokens_decoder().keys():
        raise ModelError(f"{path}: model.vocab has ids up to {max(ordinary)}, the model has fewer {fix}")
    samples = [("post_processor", "", True)]
    if unembedded:
        with contextlib.suppress(RequestError):  # no template, or one that wants another conversation
            text = tokenizer.apply_chat_template([{"role": "user", "content": ""}])
            samples.append(("added_tokens, in the chat template", text, False))
    for key, text, is_plain in samples:
        try:
            tokenizer.encode(text, add_special_tokens=is_plain)
        except RequestError as error:
            raise ModelError(f"{path}: {key}: {error.message} {fix}") from None


def _eos_ids(folder: Path, inner: tokenizers.Tokenizer, config: ModelConfig) -> tuple[int, ...]:
    """Token ids that end an answer: those of the model, and the tokenizer's own end token."""
    path = folder / "tokenizer_config.json"
    named = _special_tokens(folder, read_json(path) if path.is_file() else {})
    own = inner.token_to_id(named.get("eos_token", ""))
    return tuple(sorted({*config.eos_ids, *([own] if own is not None and own < config.vocab_size else [])}))


def _load_template(folder: Path) -> ChatTemplate | None:
    """Load the template named default. As in transformers, files with templates overrule the settings."""
    origin = folder / "tokenizer_config.json"
    settings = read_json(origin) if origin.is_file() else {}
    source = settings.get("chat_template")
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (jinja_path := folder / "chat_template.jinja").is_file():
        files.setdefault("default", jinja_path)
    if files:
        origin = files.get("default", origin)
        source = _read_text(origin) if "default" in files else None
    if isinstance(source, list):  # several by name
        named = [item for item in source if isinstance(item, dict) and item.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{origin}: chat_template must be a text, not {type(source).__name__}")
    return ChatTemplate(source, _special_tokens(folder, settings), str(origin))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, image_token, ... by name; a token is written as a text or as {"content": text}.

    As in transformers, the older special_tokens_map.json overrules the settings, unless they list the added
    tokens: then it is not read.
    """
    older = folder / "special_tokens_map.json"
    if older.is_file() and "added_tokens_decoder" not in settings:
        settings = settings | read_json(older)
    named = settings.get("extra_special_tokens")
    tokens = {name: token for name, token in settings.items() if name.endswith("_token")}
    tokens |= named if isinstance(named, dict) else {}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _fallback_bytes(inner: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The bytes of the tokens <0x00> .. <0xFF>, by id."""
    names = {f"<0x{byte:{form}}>": bytes([byte]) for byte in range(256) for form in ("02X", "02x")}
    ids = {inner.token_to_id(name): data for name, data in names.items()}
    return {token_id: data for token_id, data in ids.items() if token_id is not None}
