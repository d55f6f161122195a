"""Requests for a simulated cluster, and prompts of real tokens that share prefixes.

Used by `world.py`. Equal seeds give equal requests. Explained in docs/explain/control.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Protocol

from xxhash import xxh3_64_intdigest

from mooncake_lite.messages import Sampling
from mooncake_lite.simulator.poison import Poison
from mooncake_lite.simulator.tokens import STOP, VOCABULARY, answer_of, digests_of
from store.keys import block_digests

DOCUMENTS = 6
"""Beginnings that many prompts share; each is continued in three ways."""

CONTINUATIONS = 3


def mixed(*numbers: int) -> int:
    """Return 64 bits that stand for these numbers."""
    return xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *numbers))


def digest_of(key: int) -> int:
    """Return a second digest for a block of which only the key is known."""
    return mixed(key, 2)


@dataclass(slots=True, eq=False)
class Request:
    """One request, as its client knows it.

    token_ids     the prompt
    keys, digests of its full blocks; empty when nothing may be reused
    max_tokens    of the answer, as the client says; most_tokens: as the rank is told
    after_s       when it is sent: seconds after the one before; sent_s: the time
    n             answers to the prompt
    class_id      service class; None: drawn
    arrived       its RequestArrived has reached the control plane; cancelled: a RequestCancelled has
    dropped       branches that the control plane knows to be unwanted; left: that the client does not want
    term          number of the conductor that it was sent to last
    released      its client may have its tokens, where these are withheld at first; released_s: since when
    cause         why it was refused or failed, in a few words, or the code of its failure
    tokens        (branch, index) -> token, of those that its client has
    whole         branches of which all tokens have come
    ends_at       branch -> tokens of its whole answer, once its last message has come
    fences        branch -> attempt of the last Recall: tokens of this one and earlier ones are dropped
    gateway       that has its connection
    token_times_s when tokens left their ranks
    ends          outcomes that the control plane gave it
    told          what its client was told: "Reject" or "Fail"
    poison        what ranks cannot compute of it
    """

    request_id: str
    token_ids: Sequence[int]
    keys: list[int]
    digests: list[int]
    max_tokens: int
    most_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    wait_limit_s: float = float("inf")
    after_s: float = 0.0
    n: int = 1
    class_id: int | None = None
    sent_s: float = 0.0
    arrived: bool = False
    cancelled: bool = False
    dropped: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    term: int = 0
    released: bool = False
    released_s: float = 0.0
    cause: str = ""
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    ends_at: dict[int, int] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    gateway: str = ""
    token_times_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    poison: Poison | None = None

    @property
    def answered(self) -> int:
        """Return the number of tokens that have left ranks."""
        return len(self.token_times_s)

    def expected(self, branch: int) -> list[int]:
        """Return the whole answer of a branch."""
        last = digests_of(self.token_ids)[-1]
        return answer_of(last, self.sampling, branch, self.most_tokens)

    def answer(self, branch: int) -> list[int]:
        """Return the tokens of a branch that its client has, up to the first gap."""
        found: list[int] = []
        while (branch, len(found)) in self.tokens:
            found.append(self.tokens[branch, len(found)])
        return found


@dataclass(frozen=True, slots=True)
class Block:
    """A full block: its key, its second digest, and the emulated KV of its tokens."""

    key: int
    digest: int
    kv: tuple[int, ...]


class Source(Protocol):
    """Where the requests of a run come from.

    num_requests   of the run
    lasts_s        about how long it takes until the last one has come
    """

    num_requests: int
    lasts_s: float

    def next(self) -> Request:
        """Return one more request."""

    def ended(self, request: Request) -> None:
        """Note that a request is answered, so that a later one may continue it."""

    def known_blocks(self) -> list[Block]:
        """Return blocks that prompts are likely to begin with."""


TOO_LARGE = 0.02
"""Share of prompts that are several times as long as those that fit."""


class Workload:
    """Makes requests at random; some go on where an earlier one has ended.

    gap_s            mean time between two
    largest_tokens   of a prompt that fits
    too_large        a few prompts are several times as long
    poison           draws what ranks cannot compute of a request; see Poison.drawn
    """

    def __init__(
        self,
        random: Random,
        num_requests: int,
        gap_s: float,
        block_tokens: int,
        largest_tokens: int,
        too_large: bool = True,
        poison: Callable[[int, int, int], Poison | None] | None = None,
    ) -> None:
        self.num_requests, self.lasts_s = num_requests, num_requests * gap_s
        self._random, self._gap_s, self._too_large, self._poison = random, gap_s, too_large, poison
        self._block_tokens, self._largest_tokens = block_tokens, largest_tokens
        self._ended: list[list[int]] = []
        self._made = 0

    def next(self) -> Request:
        """Return one more request."""
        random = self._random
        self._made += 1
        if self._too_large and random.random() < TOO_LARGE:
            prompt = self._new(self._largest_tokens * random.randint(2, 5))
        elif self._ended and random.random() < 0.3:
            prompt = random.choice(self._ended) + self._new(random.randint(1, 2 * self._block_tokens))
        else:
            prompt = self._of_document()
        if not self._too_large:
            del prompt[self._largest_tokens :]
        most = 1 if random.random() < 0.1 else random.randint(1, 5 * self._block_tokens // 2)
        size, reuse = self._block_tokens, random.random() < 0.9
        digests = digests_of(prompt) if reuse else []
        sampling = Sampling(temperature=random.choice((0.0, 1.0)), seed=self._made)
        made = Request(
            f"r{self._made}", prompt, digests[size - 1 :: size], block_digests(prompt, size) if reuse else [],
            most + random.choice((0, 0, 40)), most, sampling,
            random.choice((float("inf"), float("inf"), 600.0, 20.0)),
            random.expovariate(1 / self._gap_s), random.choice((1, 1, 1, 1, 2, 3)),
        )  # fmt: skip
        made.poison = self._poison(len(prompt), most, made.n) if self._poison is not None else None
        return made

    def ended(self, request: Request) -> None:
        """Note that a request is answered, so that a later one may continue it."""
        if request.digests and len(request.token_ids) < 6 * self._block_tokens:
            self._ended.append([*request.token_ids, *request.expected(0)])
            del self._ended[:-20]

    def known_blocks(self) -> list[Block]:
        """Return the blocks that prompts are likely to begin with."""
        size, found = self._block_tokens, list[Block]()
        for document in range(DOCUMENTS):
            tokens = _document(document, 0, size)
            kv, digests = digests_of(tokens), block_digests(tokens, size)
            for index, digest in enumerate(digests):
                values = tuple(kv[index * size : (index + 1) * size])
                found.append(Block(values[-1], digest, values))
        return found

    def _of_document(self) -> list[int]:
        random = self._random
        number = min(random.randrange(DOCUMENTS), random.randrange(DOCUMENTS))
        prompt = list(_document(number, random.randrange(CONTINUATIONS), self._block_tokens))
        if random.random() < 0.2:
            return prompt  # it ends with a full block
        if random.random() < 0.5:
            return prompt + [STOP + 1] * 5  # equal prompts
        return prompt + self._new(random.randint(1, 3 * self._block_tokens))

    def _new(self, num_tokens: int) -> list[int]:
        """Return tokens that no other prompt has."""
        return [self._random.randrange(VOCABULARY) for _ in range(num_tokens)]


@cache
def _document(number: int, continuation: int, block_tokens: int) -> tuple[int, ...]:
    """Return whole blocks: those of a document, and of one of its continuations."""
    blocks = 1 + mixed(number, 77) % 5
    return tuple(
        mixed(number, 0 if index < blocks * block_tokens else continuation, index) % VOCABULARY
        for index in range((blocks + continuation) * block_tokens)
    )
