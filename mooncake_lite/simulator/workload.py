"""Requests for a modelled cluster: texts that share prefixes, and answers that continue them.

Used by `world.py`. A text is keys and lengths, never tokens. Equal prompts have equal answers. Equal seeds
give equal requests. Explained in docs/explain/control.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake_lite.simulator.hardware import Seconds

DOCUMENTS = 6
"""Beginnings that many prompts share; each is continued in three ways."""

CONTINUATIONS = 3


def mixed(*numbers: int) -> int:
    """Return 64 bits that stand for these numbers."""
    return xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *numbers))


def digest_of(key: int) -> int:
    """Return the second digest of the block with this key."""
    return mixed(key, 2)


@dataclass(slots=True)
class Text:
    """A prompt, and the answer as far as it is generated.

    keys      of its full blocks
    rest      tokens after the last full block
    flavour   stands for what those tokens and all that follow are
    """

    block_tokens: int
    keys: list[int]
    rest: int
    flavour: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and answer."""
        return len(self.keys) * self.block_tokens + self.rest

    def append(self, num_tokens: int = 1) -> None:
        """Add tokens."""
        blocks, self.rest = divmod(self.rest + num_tokens, self.block_tokens)
        for _ in range(blocks):
            self.keys.append(mixed(self.keys[-1] if self.keys else 0, self.flavour))

    def copy(self) -> Text:
        """Return a copy that grows on its own."""
        return Text(self.block_tokens, list(self.keys), self.rest, self.flavour)


@dataclass(slots=True, eq=False)
class Request:
    """One request, as the world knows it.

    text          prompt and answer so far
    reuse         whether its blocks have keys for others
    max_tokens    of the answer, at most; answer_tokens: as many it will have
    after_s       when it is sent: seconds after the one before
    sent_s        when it was sent
    answered      tokens of the answer so far
    attempt       the latest that a rank was given
    on_rank       where its latest order was sent
    n             answers to the prompt; branch: number of the first one
    parts         branch -> that answer as a request of its own; a request for one answer is its own part
    live          branches that its latest rank has not ended; dropped: those that the client does not want
    arrived       its RequestArrived has reached the control plane; cancelled: a RequestCancelled has
    released      its client may have its tokens, where these are withheld at first
    token_times_s when its tokens left their ranks, in pieces
    ends          outcomes that the control plane gave it
    told          what its client was told: "Reject" or "Fail"
    """

    request_id: str
    text: Text
    reuse: bool
    max_tokens: int
    answer_tokens: int
    wait_limit_s: float
    after_s: float = 0.0
    answered: int = 0
    sent_s: float = 0.0
    attempt: int = -1
    on_rank: int = -1
    n: int = 1
    branch: int = 0
    parts: dict[int, Request] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    arrived: bool = False
    cancelled: bool = False
    released: bool = False
    token_times_s: list[Seconds] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def fork(self, random: Random) -> None:
        """Let each answer go on by itself; the first token of each comes next."""
        self.parts = {self.branch: self}
        if self.n > 1:
            self.parts = {
                branch: Request(
                    f"{self.request_id}#{branch}", self.text.copy(), self.reuse, self.max_tokens,
                    random.randint(1, self.answer_tokens), self.wait_limit_s, branch=branch, arrived=True,
                )
                for branch in range(self.n)
            }  # fmt: skip
            for branch, part in self.parts.items():
                part.text.flavour = mixed(part.text.flavour, branch)
                part.parts = {branch: part}

    def first_token(self, now: float) -> None:
        """Note that its rank sends the first token that it computes of this prompt."""
        self.token_times_s.append(np.array([now]))

    def generate(self, times_s: Seconds) -> None:
        """Add tokens of the answer, which its rank sends at these times."""
        self.text.append(len(times_s))
        self.answered += len(times_s)
        self.token_times_s.append(times_s)

    @property
    def keys(self) -> list[int]:
        """Return the keys of its full blocks; none when nothing is reused."""
        return self.text.keys if self.reuse else []


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

    def known_keys(self) -> list[int]:
        """Return keys that prompts are likely to begin with."""


TOO_LARGE = 0.02
"""Share of prompts that are several times as long as those that fit."""


class Workload:
    """Makes requests at random; some go on where an earlier one has ended.

    gap_s            mean time between two
    largest_tokens   of a prompt that fits; a few are several times as long
    """

    def __init__(
        self, random: Random, num_requests: int, gap_s: float, block_tokens: int, largest_tokens: int
    ) -> None:
        self.num_requests, self.lasts_s = num_requests, num_requests * gap_s
        self._random, self._gap_s = random, gap_s
        self._block_tokens = block_tokens
        self._largest_tokens = largest_tokens
        self._ended: list[Text] = []
        self._made = 0

    def next(self) -> Request:
        """Return one more request."""
        random = self._random
        self._made += 1
        if random.random() < TOO_LARGE:
            text = self._continued(
                Text(self._block_tokens, [], 0, 0), self._largest_tokens * random.randint(2, 5)
            )
        elif self._ended and random.random() < 0.3:
            text = self._continued(
                random.choice(self._ended).copy(), random.randint(1, 2 * self._block_tokens)
            )
        else:
            text = self._of_document()
        answer_tokens = 1 if random.random() < 0.1 else random.randint(1, 5 * self._block_tokens // 2)
        reuse = random.random() < 0.9
        limit_s = random.choice((float("inf"), float("inf"), 600.0, 20.0))
        more = random.choice((0, 0, 40))
        n = random.choice((1, 1, 1, 1, 2, 3))
        return Request(
            f"r{self._made}", text, reuse, answer_tokens + more, answer_tokens, limit_s,
            random.expovariate(1 / self._gap_s), n=n,
        )  # fmt: skip

    def ended(self, request: Request) -> None:
        """Note that a request is answered, so that a later one may continue it."""
        if request.reuse and request.text.num_tokens < self._largest_tokens // 2:
            self._ended.append(request.text)
            del self._ended[:-20]

    def known_keys(self) -> list[int]:
        """Return the keys that prompts are likely to begin with."""
        return [key for document in range(DOCUMENTS) for key in self._document(document, 0).keys]

    def _document(self, number: int, continuation: int) -> Text:
        blocks = 1 + mixed(number, 77) % 5
        keys: list[int] = []
        for index in range(blocks + continuation):
            way = 0 if index < blocks else continuation
            keys.append(mixed(keys[-1] if keys else 0, number, way))
        return Text(self._block_tokens, keys, 0, mixed(number, continuation))

    def _of_document(self) -> Text:
        random = self._random
        number = min(random.randrange(DOCUMENTS), random.randrange(DOCUMENTS))
        text = self._document(number, random.randrange(CONTINUATIONS))
        if random.random() < 0.2:
            return text  # the prompt ends with a full block
        few = random.random() < 0.5  # equal prompts
        return self._continued(text, 5 if few else random.randint(1, 3 * self._block_tokens), fixed=few)

    def _continued(self, text: Text, num_tokens: int, *, fixed: bool = False) -> Text:
        """Add tokens to a text: always the same ones, or some that no other text has."""
        text.flavour = mixed(text.flavour, 1) if fixed else self._random.getrandbits(64)
        text.append(num_tokens)
        return text
