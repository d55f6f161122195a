"""A job: the order to one rank about one request.

Made by the role (or by a simulator) from a message, and handed to the planner as `Arrived`. Token ids, places
and sampling are opaque here. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec

PREFILL = "prefill"
"""The duty to compute a prompt and its first token."""

DECODE = "decode"
"""The duty to compute one token after the other in the running batch."""

PREFETCH = "prefetch"
"""The duty to load blocks into pages for a job that has not come yet. Every rank has it."""


class JobId(NamedTuple):
    """Names one sequence of a job on its rank.

    attempt   a request can come to the same rank again as another attempt
    branch    number of the answer among the n answers to one prompt
    """

    request_id: str
    attempt: int
    branch: int = 0


class Job(msgspec.Struct, frozen=True):
    """The work of a rank for one request, from its arrival to its one end.

        duties      {PREFILL}: ends when the first token is sampled and the KV is stored
                    {DECODE}: loads the KV of all tokens but the last, then decodes
                    both: computes the prompt and decodes on
                    {PREFETCH}: loads the KV of all tokens, which fill the blocks of load, for the prefix
                    cache; it ends without it where it finds no pages
        token_ids   the prompt, then the answer so far (of several branches: the prompt alone); the planner
                    copies and slices it, and appends to its copy
        answered    number of token_ids that belong to the answer
        max_tokens  longest answer; 0: only the prompt's KV is wanted
        max_len     longest prompt and answer together
        stop_ids    tokens that end the answer
        sampling    how the next token is chosen
        n           answers that are drawn from one prompt; branch: number of the first one
        answers     {DECODE} with several branches: (branch, its tokens so far) of those that go on
        load        places in the pool of the blocks that hold the first tokens' KV, in order
        reads       the blocks of load that are not in pages are read; otherwise computing them is faster
        store       places in the pool for the blocks that follow those of load, in order
        salt        start of the chain of keys, opaque; None: nothing may be reused, and there are no keys
        keys        of the first full blocks; the planner continues the chain with State.next_key
        offers      whether blocks that this rank fills are offered to the pool, under their keys
        scored      whether the logprobs of the prompt's tokens are wanted; nothing of it is reused then
        speculates  whether drafts may be made for it
        predicted   answer that the client expects, as tokens

    The last block of load or store may be partly filled.
    """

    request_id: str
    attempt: int
    duties: frozenset[str]
    token_ids: list[int]
    answered: int
    max_tokens: int
    max_len: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Any = None
    n: int = 1
    branch: int = 0
    answers: Seq[tuple[int, Seq[int]]] = ()
    load: Seq[Any] = ()
    reads: bool = True
    store: Seq[Any] = ()
    salt: Any = None
    keys: Seq[int] = ()
    offers: bool = False
    scored: bool = False
    speculates: bool = True
    predicted: Seq[int] = ()

    @property
    def id(self) -> JobId:
        """Return the name of this job on its rank, while it has not been forked into its branches."""
        return JobId(self.request_id, self.attempt)

    @property
    def branches(self) -> list[int]:
        """Return the numbers of the answers that this job gives."""
        return [branch for branch, _ in self.answers] or list(range(self.branch, self.branch + self.n))
