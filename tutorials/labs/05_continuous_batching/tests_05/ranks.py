"""The books of a rank, written by hand: tasks in their stages, with their pages. drive.py builds them."""

from __future__ import annotations

from typing import Any

from mooncake_lite.labs.judging import Judge

SEQUENCES = 1 << 30
"""As good as no limit."""


def pages_of(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


class Rank:
    """A rank under construction. Pages are dealt out at random, so that their numbers mean nothing."""

    def __init__(self, lab: Judge, num_pages: int, **limits: Any) -> None:
        self.lab, self.num_pages, self.page_tokens = lab, num_pages, lab.size.page_tokens
        self.limits = {"tokens": lab.size.budget, "prefills": 100, "sequences": SEQUENCES, **limits}
        self.free = list(range(num_pages))
        lab.random.shuffle(self.free)
        stages = ("running", "prefilling", "loading", "swapping", "storing", "waiting")
        self.stages: dict[str, list[dict[str, Any]]] = {stage: [] for stage in stages}
        self.cached: dict[str, list[int]] = {"tokens": [], "pages": []}
        self.duty = "both"

    def take(self, count: int) -> list[int]:
        """Deal out free pages."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test itself needs more pages"
        return taken

    def cache(self, blocks: int) -> int:
        """Put the tokens of a prompt into the prefix cache, unused. Returns their number."""
        count = blocks * self.lab.size.block_pages
        self.cached = {"tokens": list(range(count * self.page_tokens)), "pages": self.take(count)}
        return count * self.page_tokens

    def add(self, stage: str, name: str, tokens: int, pages: list[int] | None = None, **more: Any) -> Any:
        """Add a task. One that waits has no pages; a running one lacks the KV of its last token.

        computed   tokens whose KV is in its pages
        begins     tokens that it has in common with the cached prompt
        load       blocks that lie in the pool for it; reads: they are read, if they are in no page
        """
        running = stage in ("running", "swapping")
        if pages is None:
            count = 0 if stage == "waiting" else pages_of(tokens - running, self.page_tokens)
            pages = self.take(count)
        given = {"name": name, "tokens": tokens, "pages": pages, "answers": running, "duty": "both"}
        given |= {"computed": tokens - 1 if running else 0, "branches": 1, "begins": 0, "load": 0}
        given |= {"reads": True, "problem": "", "by_layers": False, **more}
        self.stages[stage].append(given)
        return given

    def full(self, pages: int) -> int:
        """Tokens of a running sequence that holds so many pages and needs one more for its next token."""
        return pages * self.page_tokens + 1

    def roomy(self, pages: int) -> int:
        """Tokens of a running sequence that holds so many pages and needs none for its next token."""
        return (pages - 1) * self.page_tokens + self.lab.random.randint(2, self.page_tokens)

    def inputs(self, **more: Any) -> dict[str, Any]:
        """What drive.py is asked."""
        block_tokens = self.lab.size.block_pages * self.page_tokens
        return {
            "num_pages": self.num_pages, "page_tokens": self.page_tokens, "block_tokens": block_tokens,
            "limits": self.limits, "cached": self.cached, "duty": self.duty, **self.stages, **more,
        }  # fmt: skip


def kept(lab: Judge, changed: bool, called: str) -> None:
    """The region has only chosen."""
    before = "as before"
    lab.expect(
        "changed" if changed else before, before, f"{called} (the books)", "it chooses; it changes nothing"
    )


def names(lab: Judge, count: int) -> list[str]:
    """Names of jobs, in the order of their arrival."""
    letters = lab.random.sample("abcdefghijklmnopqrstuvwxyz", min(count, 26))
    return [f"{letters[number % len(letters)]}{number}" for number in range(count)]
