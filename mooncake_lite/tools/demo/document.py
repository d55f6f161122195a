"""The long document that the demo asks about: docs/explain/paper.md as it once was, shortened to some tokens.

Called by `demo.story`. Knows nothing of HTTP. `document.txt` is a copy that does not follow the page: drawn
answers, and figures measured with it, would change with every word. It is no .md: a page's links break
outside its folder.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from importlib.resources import files

DOCUMENT_TOKENS = 1600
"""Long enough that computing it takes seconds on two cores, short enough that the demo takes two minutes."""

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def document_text() -> str:
    """The whole page as plain prose: links keep their words and lose their targets."""
    page = (files("mooncake_lite.tools.demo") / "document.txt").read_text(encoding="utf-8")
    return _LINK.sub(r"\1", page)


def shorten(text: str, limit_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of `text` that has at most `limit_tokens` tokens and ends with a word.

    count_tokens   tokens of a text. It is asked about log2(words) times: a beginning with more words never
                   has fewer tokens by more than a few, which a binary search tolerates.
    """
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    fitting = bisect_right(ends, limit_tokens, key=lambda end: count_tokens(text[:end]))
    return text[: ends[fitting - 1]] if fitting else ""
