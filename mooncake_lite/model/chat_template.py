"""The chat template of a model folder: messages in, the prompt's text out.

Used by tokenizer.py. A template comes with the weights, so it is foreign text: it runs in Jinja's
sandbox. It was written for transformers, so it gets what transformers' apply_chat_template gives: the same
helpers, and messages in the same form. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncake_lite.errors import ModelError, RequestError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning in the order of preference, from transformers 5.23."""


class ChatTemplate:
    """A compiled template.

    source    the Jinja text
    special   what the template may ask for by name: bos_token, eos_token, ...
    """

    def __init__(self, source: str, special: dict[str, str], origin: str):
        """Compiles the template. Raises ModelError, naming `origin`, when it is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # also of Python, which compiles the result: {% break %} alone
            raise ModelError(f"{origin}: the chat template is not valid: {_one_line(error)}") from None
        self._special = special
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The prompt's text. Raises RequestError when the template refuses these messages.

        Content is a text or a list of text parts. Parts reach the template as they are if it goes over some
        of them and does not fail. Otherwise it takes content as a text, and gets them joined.
        """
        chat = [self._message(message) for message in messages]
        parts = [message["content"] for message in chat if isinstance(message.get("content"), _Parts)]
        try:
            if parts:
                with contextlib.suppress(Exception):
                    text = self._template.render(messages=chat, **self._special, **variables)
                    if any(each.seen for each in parts):
                        return text
                chat = [_joined(message) for message in chat]
            return self._template.render(messages=chat, **self._special, **variables)
        except Exception as error:  # a template can fail in any way that its expressions can
            reason = _one_line(error)
            raise RequestError(
                f"the model's chat template refuses this: {reason}", param="messages"
            ) from None

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as transformers gives it to a template: no nulls, and reasoning by two more names.

        OpenAI renamed the role "system" for newer models; most templates know the old name only.
        """
        given = {name: value for name, value in message.items() if value is not None}
        for name in REASONING:
            if name in given:
                given = {"thinking": given[name]} | given | {"reasoning_content": given[name]}
                break
        if given.get("role") == "developer" and not self._knows_developer:
            given["role"] = "system"
        if isinstance(given.get("content"), list):
            given["content"] = _Parts(given["content"])
        return given


class _Parts(list[dict[str, Any]]):
    """Content in parts, which cannot be written as a text.

    seen   whether the template went over the parts, took one, or wrote a message that has them
    """

    seen = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.seen = True
        return super().__iter__()

    def __reversed__(self) -> Iterator[dict[str, Any]]:
        self.seen = True
        return super().__reversed__()

    def __repr__(self) -> str:
        self.seen = True
        return super().__repr__()

    def __getitem__(self, index: Any) -> Any:
        self.seen |= not isinstance(index, slice)  # content[1:] means characters as well
        return super().__getitem__(index)

    def __str__(self) -> str:
        raise TypeError("content in parts is no text")


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, _Parts):
        return message
    return message | {"content": "".join([part["text"] for part in content])}


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what a model said, for training; here it is text.

    It is a call of a macro, as in transformers: variables that are set in it are unknown after it.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to say it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON with the arguments of transformers. Jinja's own filter escapes for HTML.

    iterencode goes over lists in Python, so _Parts notices it; json.dumps would not call it.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
