"""Requests that are drawn: prompts of real tokens, and the answers that the emulated engine gives to them.

A rank that reads wrong KV answers with wrong tokens. Equal seeds give equal requests.

    VOCABULARY   tokens to choose from: an answer has some 40 of them, unless it is cut
    STOP         the token that ends answers
    DOCUMENTS    beginnings that many prompts share; each is continued in so many ways as CONTINUATIONS says
    TOO_LARGE    share of prompts that are several times as long as those that fit
    digest_after   as the emulated engine has it: client, rank, control plane and custody ask for the same

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from random import Random
from typing import Any

from mooncake_lite.engine import emulated
from mooncake_lite.engine.emulated import FIRST, emulated_token
from mooncake_lite.messages import Sampling
from mooncake_lite.simulator.workload import Request, mixed
from scheduler.instance.step import Draw
from store.keys import block_digests
from tests.worlds.faults import Poison
from tests.worlds.memory import Content

VOCABULARY, STOP = 40, 3
DOCUMENTS, CONTINUATIONS, TOO_LARGE = 6, 3, 0.02

digest_after = lru_cache(1 << 16)(emulated.digest_after)


def digests_of(token_ids: Sequence[int], before: int = FIRST) -> list[int]:
    """Return the emulated KV of each token. before: that of the token in front of them.

    The last digest of a block is its key in runs with faults: it stands for the block and all before it.
    """
    return list(accumulate(token_ids, digest_after, initial=before))[1:]


def next_key(salt: Any, last_key: int | None, token_ids: Sequence[int]) -> int:
    """Return the key of a full block, as `scheduler.instance.state.NextKey`."""
    return digests_of(token_ids, FIRST if last_key is None else last_key)[-1]


def answer_of(last: int, sampling: Sampling, branch: int, max_tokens: int) -> list[int]:
    """Return a whole answer, without ranks, pages or a pool. last: the digest of the prompt's last token."""
    answer: list[int] = []
    draw = Draw(sampling, (), 0, frozenset({STOP}), branch)
    while len(answer) < max_tokens:
        token = emulated_token(last, draw, VOCABULARY)
        if token == STOP:
            break
        answer.append(token)
        last = digest_after(last, token)
    return answer


@dataclass(slots=True, eq=False)
class DrawnRequest(Request):
    """A request of which every token is known.

    class_id      None: drawn when it is sent
    n             answers to the prompt
    arrived       its RequestArrived has reached the control plane; cancelled: a RequestCancelled has
    dropped       branches that the control plane knows to be unwanted; left: that the client does not want
    term          number of the conductor that it was sent to last
    tokens        (branch, index) -> token, of those that its client has
    ends_at       branch -> tokens of its whole answer, once its last message has come
    gateway       that has its connection
    ends          outcomes that the control plane gave it
    told          what its client was told: "Reject" or "Fail"
    poison        what ranks cannot compute of it
    """

    class_id: int | None = None
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    arrived: bool = False
    cancelled: bool = False
    dropped: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    term: int = 0
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    ends_at: dict[int, int] = field(default_factory=dict)
    gateway: str = ""
    ends: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    poison: Poison | None = None

    def expected(self, branch: int) -> list[int]:
        """Return the whole answer of a branch."""
        return answer_of(digests_of(self.token_ids)[-1], self.sampling, branch, self.most_tokens)

    def answer(self, branch: int) -> list[int]:
        """Return the tokens of a branch that its client has, up to the first gap."""
        found: list[int] = []
        while (branch, len(found)) in self.tokens:
            found.append(self.tokens[branch, len(found)])
        return found


class Workload:
    """Makes requests at random; some go on where an earlier one has ended.

    gap_s            mean time between two
    largest_tokens   of a prompt that fits
    too_large        a few prompts are several times as long
    poison           draws what ranks cannot compute of a request; see Poison.drawn
    """

    def __init__(
        self, random: Random, num_requests: int, gap_s: float, block_tokens: int, largest_tokens: int,
        too_large: bool = True, poison: Callable[[int, int, int], Poison | None] | None = None,
    ) -> None:  # fmt: skip
        self.num_requests, self.lasts_s = num_requests, num_requests * gap_s
        self._random, self._gap_s, self._too_large, self._poison = random, gap_s, too_large, poison
        self._block_tokens, self._largest_tokens = block_tokens, largest_tokens
        self._ended: list[list[int]] = []
        self._made = 0

    def next(self) -> DrawnRequest:
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
        made = DrawnRequest(
            f"r{self._made}", prompt, digests[size - 1 :: size], block_digests(prompt, size) if reuse else [],
            most + random.choice((0, 0, 40)), most,
            random.choice((float("inf"), float("inf"), 600.0, 20.0)),
            random.expovariate(1 / self._gap_s), n=random.choice((1, 1, 1, 1, 2, 3)), sampling=sampling,
        )  # fmt: skip
        made.poison = self._poison(len(prompt), most, made.n) if self._poison is not None else None
        return made

    def ended(self, request: DrawnRequest) -> None:
        """Note that a request is answered, so that a later one may continue it."""
        if request.digests and len(request.token_ids) < 6 * self._block_tokens:
            self._ended.append([*request.token_ids, *request.expected(0)])
            del self._ended[:-20]

    def known_blocks(self) -> list[tuple[Content, int]]:
        """Return the blocks that prompts are likely to begin with, and their second digests."""
        size, found = self._block_tokens, list[tuple[Content, int]]()
        for document in range(DOCUMENTS):
            tokens = _document(document, 0, size)
            contents = [Content(tuple(kv)) for kv in zip(*[iter(digests_of(tokens))] * size)]
            found += zip(contents, block_digests(tokens, size), strict=True)
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
