"""Text to token ids and back, and messages to text, by the files of a model folder.

Used by the gateway, the engine's callers and the command line; needs no torch. No code of a model
folder is ever run: the tokenizer is data, the template runs in a sandbox. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mooncake_lite.errors import ModelError, RequestError
from mooncake_lite.model.chat_template import ChatTemplate
from mooncake_lite.model.config import load_config, read_json
from mooncake_lite.model.token_bytes import token_bytes

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The calls for batches get one text each: without this they would start a thread per core for nothing."""

LONG_IDS = 256
"""More ids than this are decoded by the call for batches, which releases the interpreter's lock. Fewer take
less time than getting the lock back can."""

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are not (yet) a character."""


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
        self._byte_ids = _fallback_byte_ids(inner, description)
        self._token_bytes = token_bytes(description)
        self._special_ids = frozenset(
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        )

    def unembedded(self) -> dict[int, str]:
        """Return the tokens of which the model has no embedding, by id."""
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

    def detokenizer(self) -> Detokenizer:
        """A fresh Detokenizer for one answer."""
        return Detokenizer(self)

    def is_fallback_byte(self, token_id: int) -> bool:
        """True for the tokens <0x00> .. <0xFF> of vocabularies that spell rare characters in them."""
        return token_id in self._byte_ids

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which decode leaves out unless told otherwise."""
        return token_id in self._special_ids


class Detokenizer:
    """Turns one answer into text as its tokens come, never showing part of a character.

    Invariant: the texts returned by all pushes and the flush, joined, are decode(all ids).

        ids     ... | a b c | d e            a..c: kept as context, because how a token is written may
                    ^       ^                depend on the one before (a leading blank); d, e: not shown yet
                 context   shown
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete; "" while a character is not whole."""
        return "".join([self._push(token_id) for token_id in ids])

    def flush(self) -> str:
        """The rest, with U+FFFD for what never became a character. The Detokenizer is then empty."""
        text = self._text()
        self._ids, self._shown = [], 0
        return text

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._tokenizer.is_fallback_byte(token_id):
            return ""  # a run of such bytes is decoded as a whole, and the next one may change it
        if self._tokenizer.is_special(token_id):
            return ""  # adds nothing, and does not end such a run either
        text = self._text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return text

    def _text(self) -> str:
        """What is known but not shown."""
        shown = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(shown) :]


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
    tokenizer = Tokenizer(inner, config.eos_ids, _load_template(folder), config.vocab_size)
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


def _fallback_byte_ids(inner: tokenizers.Tokenizer, description: dict[str, Any]) -> frozenset[int]:
    """Ids of <0x00> .. <0xFF> where the decoder reads them as bytes, else none."""
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    if not any(step.get("type") == "ByteFallback" for step in steps):
        return frozenset()
    ids = (inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
