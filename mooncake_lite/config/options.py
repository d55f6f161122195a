"""Types of command-line options that several commands have.

Used by `chat` and `engine.commands`. Knows no command. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

from typing import Any

import click


class NumberRange(click.FloatRange):
    """click's range of numbers, to which everything but a number belongs: it lets nan pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails for what is none, and outside of the range."""
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number
