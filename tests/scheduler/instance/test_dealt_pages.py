"""Pages of sequences that are dealt out to members: beside a plain model, and under a planner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from scheduler.instance import DECODE, Job, JobId, SwapAnswered
from scheduler.instance.dealt_pages import DealtPages, pages_of_rows, place_in_rows, tokens_of_rows
from scheduler.instance.outcomes import Ended, Failed, Preempted, Swapped, SwapWanted
from scheduler.instance.pages import Pages, pages_for
from tests.conftest import examples
from tests.scheduler.instance.model_runner import BLOCK, choose, kv_of
from tests.scheduler.instance.model_runner import PAGE as SMALL_PAGE
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick

PAGE = 16


def placed(tokens: int, unit: int, turns: int) -> list[tuple[int, int]]:
    """(member, its how many-th page of the sequence) of each token, placed one after the other."""
    has, places = [0] * turns, []
    for token in range(tokens):
        turn = token // unit % turns
        places.append((turn, has[turn] // PAGE))
        has[turn] += 1
    return places


@settings(max_examples=examples(60))
@given(st.integers(0, 4000), st.integers(1, 5), st.sampled_from([256, 512]), st.sampled_from([16, 64, 256]))
def test_books_of_pages_agree_with_tokens_that_are_placed_one_by_one(
    length: int, turns: int, unit: int, block: int
) -> None:
    places = placed(length, unit, turns)
    pages = DealtPages(0, PAGE, unit, turns)
    needed = 1 + max((page for _, page in places), default=-1)
    assert pages.needed(length) == pages_of_rows(length, PAGE, unit, turns) == needed
    assert [place_in_rows(token, PAGE, unit, turns) for token in range(length)] == places
    assert [pages.index(token) for token in range(0, length, 7)] == [page for _, page in places[::7]]
    held = [*range(1000, 1000 + needed)]
    for first in range(-(-length // block)):
        last = min(length, (first + 1) * block)
        mine = sorted({page for _, page in places[first * block : last]})
        found = pages.of_blocks(held, first, 1, block)
        assert list(found[: len(mine)]) == [1000 + page for page in mine]
        assert len(found) <= block // PAGE
    whole = length // block
    several = [page for first in range(whole) for page in pages.of_blocks(held, first, 1, block)]
    assert list(pages.of_blocks(held, 0, whole, block)) == several


@settings(max_examples=examples(60))
@given(st.integers(0, 300), st.integers(1, 5), st.sampled_from([256, 512]))
def test_the_longest_sequence_of_some_pages_needs_them_and_one_more_token_another_page(
    pages: int, turns: int, unit: int
) -> None:
    most = tokens_of_rows(pages, PAGE, unit, turns)
    assert pages_of_rows(most, PAGE, unit, turns) <= pages < pages_of_rows(most + 1, PAGE, unit, turns)


@settings(max_examples=examples(30))
@given(st.integers(0, 3000), st.sampled_from([256, 512]))
def test_one_member_has_the_pages_of_a_rank_that_is_alone(length: int, unit: int) -> None:
    dealt, pages = DealtPages(0, PAGE, unit, 1), Pages(0, PAGE)
    assert dealt.needed(length) == pages.needed(length) == pages_for(length, PAGE)
    assert dealt.index(length) == pages.index(length)
    held = range(pages.needed(length))
    blocks = -(-length // 64)
    assert list(dealt.of_blocks(held, 0, blocks, 64)) == list(pages.of_blocks(held, 0, blocks, 64))


class AnyBranches(RuleBasedStateMachine):
    """Sequences that begin, grow, fork and end, beside what each member's pages hold of them."""

    UNIT, SIZE = 4, 2

    def __init__(self) -> None:
        super().__init__()
        chosen = random.Random(3)
        self.turns = 3
        self.pages = DealtPages(60, self.SIZE, self.UNIT, self.turns)
        self.held: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.memory: dict[tuple[int, int, int], int] = {}
        self.next = iter(lambda: chosen.randrange(10**9), None)

    def take(self, count: int) -> list[int]:
        return list(self.pages.free)[::-1][:count]

    def write(self, number: int, token: int) -> None:
        turn, index = place_in_rows(token, self.SIZE, self.UNIT, self.turns)
        page = self.held[number][index]
        self.memory[turn, page, token % self.SIZE] = self.tokens[number][token]

    @rule(length=st.integers(1, 40))
    def begin(self, length: int) -> None:
        if self.pages.needed(length) <= len(self.pages.free):
            taken = self.take(self.pages.needed(length))
            self.pages.take(taken)
            self.held.append(taken)
            self.tokens.append([next(self.next) for _ in range(length)])
            for token in range(length):
                self.write(len(self.held) - 1, token)

    @rule(which=st.integers(0, 9), count=st.integers(1, 12))
    def decode(self, which: int, count: int) -> None:
        for _ in range(count if self.held else 0):
            number = which % len(self.held)
            held, tokens = self.held[number], self.tokens[number]
            length = len(tokens) + 1
            missing = self.pages.needed(length) - len(held)
            copied = not missing and self.pages.used[held[self.pages.index(length - 1)]] > 1
            if missing + copied > len(self.pages.free):
                return
            tokens.append(next(self.next))
            (new, users), before = (self.take(missing + copied), dict(self.pages.used)), list(held)
            source = self.pages.grow(held, length, new)
            assert (source is not None) == copied
            if source is not None:
                changed = [at for at, (old, now) in enumerate(zip(before, held, strict=True)) if old != now]
                assert changed == [self.pages.index(length - 1)]
                assert (before[changed[0]], held[changed[0]]) == (source, new[0])
                assert self.pages.used[source] == users[source] - 1
                for turn in range(self.turns):
                    for row in range(self.SIZE):
                        if (turn, source, row) in self.memory:
                            self.memory[turn, new[0], row] = self.memory[turn, source, row]
            self.write(number, length - 1)

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        if self.held and len(self.held) < 8:
            number = which % len(self.held)
            self.pages.share(self.held[number])
            self.held.append(list(self.held[number]))
            self.tokens.append(list(self.tokens[number]))

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.held:
            number = which % len(self.held)
            self.pages.give_back(self.held.pop(number))
            del self.tokens[number]

    @invariant()
    def every_token_is_where_its_member_looks_for_it(self) -> None:
        self.pages.check()
        assert Counter(page for held in self.held for page in held) == self.pages.used
        for held, tokens in zip(self.held, self.tokens):
            for number, token in enumerate(tokens):
                turn, index = place_in_rows(number, self.SIZE, self.UNIT, self.turns)
                assert self.memory[turn, held[index], number % self.SIZE] == token


TestAnyBranches = AnyBranches.TestCase
TestAnyBranches.settings = settings(max_examples=examples(40), stateful_step_count=40)


# ------------------------------------------------------------------------------- under a planner


class Sequences:
    """Decode jobs of one rank whose KV comes from the pool, and goes there when pages run out."""

    def __init__(self, chosen: random.Random) -> None:
        self.chosen = chosen
        turns, unit = chosen.randint(1, 4), chosen.choice([4, 8])
        rows = chosen.randint(3, 5)
        self.rank = Rank(
            DECODE,
            dealt=(unit, turns),
            num_pages=max(rows * unit // SMALL_PAGE, 28 // turns + 8),
            preemption="swap",
            half_blocks=chosen.randint(1, 3),
            ends=lambda: chosen.random() < 0.6,
            breaks=lambda: "broken" if chosen.random() < 0.02 else "",
        )
        self.sent: dict[JobId, Job] = {}
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.kept: dict[object, list[object]] = {}
        self.places = 0
        self.seen: Counter[str] = Counter()

    def new_places(self, tokens: list[int]) -> list[object]:
        """Places for the KV of tokens, which is there already."""
        kv, found = kv_of(tokens), list[object]()
        for start in range(0, len(tokens), BLOCK):
            self.places += 1
            found.append(self.places)
            block = kv[start : start + BLOCK]
            self.rank.pool[self.places] = block + [None] * (BLOCK - len(block))
        return found

    def arrive(self, number: int) -> None:
        """A prompt that has been computed elsewhere, with the first tokens of its branches."""
        name, prompt = f"r{number}", [self.chosen.randrange(50) for _ in range(self.chosen.randint(1, 20))]
        self.prompts[name] = prompt
        branches = [
            (branch, [choose(kv_of(prompt)[-1], branch)]) for branch in range(self.chosen.randint(1, 3))
        ]
        self.answers |= {(name, branch): list(first) for branch, first in branches}
        more = {"max_tokens": 24, "salt": b"s", "load": self.new_places(prompt)}
        self.send(job(name, [DECODE], prompt, n=len(branches), answers=branches, **more))

    def send(self, sent: Job) -> None:
        self.sent[sent.id._replace(branch=sent.branches[0])] = sent
        self.rank.arrive(sent)

    def hear(self, said: list[object]) -> None:
        for one in said:
            self.seen[type(one).__name__] += 1
            if isinstance(one, SwapWanted):
                ids = list(one.token_ids)
                there = self.new_places(ids)
                has = self.chosen.randint(
                    0, len(ids) // BLOCK
                )  # the pool has the first blocks, and some later
                keeps = [
                    n < has or (self.chosen.random() < 0.3 and (n + 1) * BLOCK <= len(ids))
                    for n in range(len(there))
                ]
                places = [None if kept else ("swapped", place) for kept, place in zip(keeps, there)]
                self.kept[one.job] = [new or old for old, new in zip(there, places)]
                self.hear(list(self.rank.tell(SwapAnswered(one.job, places))))
            elif isinstance(one, Swapped):
                self.again(one, self.kept.pop(one.job))
            elif isinstance(one, Preempted):
                self.kept.pop(one.job, None)
                self.again(one, self.new_places(list(one.token_ids)[:-1]))
            elif isinstance(one, Failed):
                failed = self.sent[one.job]
                self.send(replace(failed, attempt=failed.attempt + 1))

    def again(self, ended: Swapped | Preempted, load: list[object]) -> None:
        """A branch comes back, with all of its KV in the pool."""
        more = {"attempt": ended.job.attempt + 1, "answered": ended.answered, "branch": ended.job.branch}
        more |= {"max_tokens": 24, "salt": b"s", "load": load}
        self.send(job(ended.job.request_id, [DECODE], ended.token_ids, **more))


def test_sequences_over_dealt_pages_go_on_right_whatever_is_forked_swapped_and_broken(soak: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40 * soak):
        run = Sequences(random.Random(seed * 7919 + (soak > 1) * random.randrange(10**6)))
        for number in range(6):
            run.arrive(number)
            for _ in range(run.chosen.randint(0, 6)):
                run.hear(list(run.rank.step(unchanged=number == 3)[1]))
        for _ in range(2000):
            if not run.rank.state.busy:
                break
            run.hear(list(run.rank.step(unchanged=False)[1]))
        state = run.rank.state
        assert not state.busy, f"seed {seed}"
        assert len(state.pages.free) == state.pages.num_pages
        done = {(one.job.request_id, one.job.branch) for one in run.rank.said if isinstance(one, Ended)}
        assert run.answers.keys() == done, f"seed {seed}"
        for name, prompt in run.prompts.items():
            for branch in [b for n, b in run.answers if n == name]:
                assert answer_of(run, name, branch) == wanted(prompt, branch), f"seed {seed}: {name} {branch}"
        seen.update(run.seen)
        seen["copies"] += run.rank.runner.copies  # type: ignore[attr-defined]
    for kind in ("Swapped", "Preempted", "copies"):
        assert seen[kind] > 5, seen


def wanted(prompt: list[int], branch: int) -> list[int]:
    """The answer of a rank that is alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 24:
        tokens.append(choose(kv_of(tokens)[-1], branch))
    return tokens[len(prompt) :]


def answer_of(run: Sequences, name: str, branch: int) -> list[int]:
    """All tokens of a branch, the first one from elsewhere."""
    told = {
        one.index: one.token
        for one in run.rank.said
        if type(one).__name__ == "Token" and (one.job.request_id, one.job.branch) == (name, branch)
    }
    first = run.answers[name, branch]
    return [*first, *(told[index] for index in range(1, 24))]
