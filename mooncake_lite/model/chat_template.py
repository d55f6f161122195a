"""The chat template of a model folder: messages in, the prompt's text out.

Used by tokenizer.py. A template comes with the weights, so it is foreign text: it runs in Jinja's
sandbox, with the handful of helpers that templates count on. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncake_lite.errors import ModelError, RequestError


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

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The prompt's text. Raises RequestError when the template refuses these messages."""
        try:
            return self._template.render(messages=list(messages), **self._special, **variables)
        except Exception as error:  # a template can fail in any way that its expressions can
            reason = _one_line(error)
            raise RequestError(
                f"the model's chat template refuses this: {reason}", param="messages"
            ) from None


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what a model said, for training; here it is text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to say it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
