"""The compute role as a conversation: messages in, messages out, with a runner that has no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.roles.compute import ComputeRole
from mooncake_lite.roles.compute_rank import ComputeRank
from scheduler.instance import DECODE, PREFILL, Limits, Pages, Preemption, Staging, State, new_prefix_cache
from store.keys import block_digests, next_key, prefix_keys
from tests.mooncake_lite.roles.fake_hub import ROLES
from tests.scheduler.instance.model_runner import BLOCK, PAGE, ModelRunner, kv_of

pytestmark = pytest.mark.quick

GREEDY = m.Sampling(0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn without messages looks at the clock twice: from one pass to the next it takes half a second."""
    looks = itertools.count(0.0, 0.25)
    monkeypatch.setattr("mooncake_lite.roles.compute.time", SimpleNamespace(monotonic=looks.__next__))


class Wire:
    """A conductor and a gateway: what to receive next, what was told, metrics."""

    def __init__(self) -> None:
        self.inbox: list[m.Message] = []
        self.told: list[Any] = []
        self.stats: list[Any] = []

    def receive(self, wait_s: float) -> list[m.Message]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, message: m.Message) -> bool:
        (self.stats if isinstance(message, m.RankStats) else self.told).append(message)
        return True


class Rank:
    """One rank with its duties: `hear` delivers messages and returns what is told in one turn."""

    def __init__(
        self, *duties: str, num_pages: int = 64, half_blocks: int = 1, sharing: str = "off",
        preemption: Preemption = "recompute", **runner: Any,
    ) -> None:  # fmt: skip
        self.wire = Wire()
        self._seen = 0
        self.pool: dict[Any, Any] = {}
        self.runner = ModelRunner(self.pool, num_pages, half_blocks, 3, **runner)
        pages, staging = Pages(num_pages, PAGE), Staging(half_blocks, 3)
        prefix = new_prefix_cache(sharing, pages, BLOCK)
        state = State(
            frozenset(duties), pages, staging, BLOCK, Limits(8), next_key=next_key, prefix=prefix,
            preemption=preemption,
        )  # fmt: skip
        transfers: Any = SimpleNamespace(
            counters={}, moved_bytes={}, serving_bytes=0, served_bytes={}, control_counters={},
            socket_counters={},
        )  # fmt: skip
        open_gateway: Any = lambda endpoint: self.wire  # noqa: E731
        conductor: Any = self.wire
        rank = ComputeRank(2, ROLES, state, transfers, conductor, open_gateway, lambda: False)
        rank.epoch = 5
        self.role = ComputeRole(rank, self.runner, 1000)  # type: ignore[arg-type]
        self.hear(m.GatewayAt("gateway-0", "ipc://tokens"))

    def hear(self, *messages: m.Message) -> list[Any]:
        self.wire.inbox += messages
        before = len(self.wire.told)
        self.role.turn(0.0)
        self.role.state.check()
        return self.wire.told[before:]

    def until(self, kind: type) -> Any:
        """Go on until a message of this kind is told; return the first one that was not returned before."""
        for _ in range(200):
            while self._seen < len(self.wire.told):
                self._seen += 1
                if isinstance(self.wire.told[self._seen - 1], kind):
                    return self.wire.told[self._seen - 1]
            self.hear()
        raise AssertionError(f"no {kind.__name__}")

    def in_pool(self, tokens: list[int]) -> list[m.BlockRef]:
        """Put the blocks of these tokens into the pool."""
        kv = kv_of(tokens)
        refs = refs_of(-(-len(tokens) // BLOCK), first=100 + len(self.pool))
        for index, ref in enumerate(refs):
            block = kv[index * BLOCK : (index + 1) * BLOCK]
            self.pool[ref] = block + [None] * (BLOCK - len(block))
        return refs

    def decode(self, tokens: list[int], **more: Any) -> m.Decode:
        """A job whose tokens but the last have their KV in the pool."""
        blocks = self.in_pool(tokens[:-1])
        values = {"keys": [], "salt": b"", "max_tokens": 30, "attempt": 3, "answered": 0} | more
        return m.Decode(
            "a", "gateway-0", tokens, values["answered"], blocks, None, values["keys"], values["salt"],
            GREEDY, values["max_tokens"], [], [m.Span("queue", 0, 0.5)], values["attempt"],
        )  # fmt: skip


def refs_of(count: int, first: int = 1) -> list[m.BlockRef]:
    return [m.BlockRef(first + n, 3, 1000 * n, 512) for n in range(count)]


def prefill(tokens: list[int], load: list[m.BlockRef], store: int, **more: Any) -> m.Prefill:
    refs = refs_of(store)
    tail = refs.pop() if len(tokens) % BLOCK else None
    spans = [m.Span("queue", 0, 0.5)]
    return m.Prefill(
        "a", "gateway-0", tokens, load, refs, tail, more.get("sampling", GREEDY), more.get("max_tokens", 30),
        more.get("stop_ids", []), more.get("answered", 0), {"dram": len(load) * BLOCK}, spans,
        more.get("attempt", 3), more.get("keys", []), more.get("salt", b""),
    )  # fmt: skip


def test_a_prefill_tells_its_token_at_once_and_its_end_when_every_byte_is_in_the_pool() -> None:
    rank = Rank(PREFILL)
    tokens = [*range(14)]
    load = rank.in_pool(tokens[:8])
    rank.hear(prefill(tokens, load, store=2))
    token = rank.until(m.Tokens)
    assert rank.pool.keys() == set(load)
    assert (token.index, len(token.token_ids), token.cached_tokens) == (0, 1, {"dram": 8})
    assert [(span.stage, span.count) for span in token.spans] == [("queue", 0), ("load", 2), ("compute", 6)]
    done = rank.until(m.PrefillDone)
    assert (done.first_tokens, done.finishes, done.attempt, done.epoch) == (token.token_ids, [None], 3, 5)
    assert done.checksums == [tuple(kv_of(tokens)[8:12])]
    assert [span.stage for span in done.spans] == ["queue", "load", "compute", "store"]
    assert (done.spans[3].nbytes, done.spans[3].count) == (1024, 2)
    assert (done.load_s, done.compute_s, done.store_s) == (
        done.spans[1].seconds, done.spans[2].seconds, done.spans[3].seconds,
    )  # fmt: skip
    assert (done.computed_tokens, done.loaded_blocks) == (6, 2)


def test_a_prefill_for_no_token_stores_its_blocks_and_ends_without_one() -> None:
    rank = Rank(PREFILL)
    tokens = [*range(14)]
    rank.hear(prefill(tokens, [], store=4, max_tokens=0))
    told = rank.until(m.Tokens)
    assert (told.index, told.token_ids, told.finish, told.cached_tokens) == (0, [], "length", {"dram": 0})
    done = rank.until(m.PrefillDone)
    assert done.finishes == ["length"]
    assert done.checksums == [tuple(kv_of(tokens)[n : n + 4]) for n in (0, 4, 8)]


def test_the_logprobs_of_a_prompt_are_sent_with_its_first_token() -> None:
    tokens = [*range(14)]
    scored = m.Sampling(0.0, logprobs=0, prompt_logprobs=0)
    said = Rank(PREFILL)
    said.hear(prefill(tokens, [], store=4, sampling=scored))
    told = said.until(m.Tokens)
    assert [token for _, token in told.prompt_logprobs] == tokens[1:]
    assert (len(told.token_ids), told.end_token) == (1, None)

    ends = Rank(PREFILL)
    ends.hear(prefill(tokens, [], store=4, sampling=scored, stop_ids=told.token_ids))
    end = ends.until(m.Tokens)
    assert (end.token_ids, end.finish, end.end_token) == ([], "stop", told.token_ids[0])

    resumed = Rank(PREFILL)
    resumed.hear(prefill(tokens, [], store=4, sampling=scored, answered=2))
    assert resumed.until(m.Tokens).prompt_logprobs == []


def test_the_time_of_a_full_hit_does_not_include_its_load() -> None:
    rank = Rank(PREFILL)
    tokens = [*range(8)]
    rank.hear(prefill(tokens, rank.in_pool(tokens), store=0))
    done = rank.until(m.PrefillDone)
    assert done.compute_s == 0.5, "the one forward pass of the model runner"
    assert done.load_s > 0


def test_a_decode_rank_tells_when_it_has_loaded_each_token_and_its_end() -> None:
    rank = Rank(DECODE)
    rank.hear(rank.decode([*range(6)], max_tokens=2))
    loaded = rank.until(m.DecodeLoaded)
    assert (loaded.request_id, loaded.attempt, loaded.epoch) == ("a", 3, 5)
    assert (loaded.load_s > 0, loaded.loaded_blocks) == (True, 2)
    assert rank.until(m.Tokens).spans == []
    last = rank.until(m.Tokens)
    assert (last.index, last.finish) == (1, "length")
    assert [(span.stage, span.count) for span in last.spans] == [("queue", 0), ("load", 2), ("decode", 2)]
    done = rank.wire.told[-1]
    assert done == m.DecodeDone("a", 3, 5, 0, 2, 2, 2, 6 + 7, 2 * 0.5)


def test_a_cancel_while_loading_is_answered_at_once_and_the_other_groups_are_not_fetched() -> None:
    """The loop used to wait for the whole load, for up to 60 s, while the running batch stood still."""
    rank = Rank(DECODE, ends=lambda: False)
    rank.hear(rank.decode([*range(17)]))
    assert rank.hear(m.Cancel("a", 3)) == [m.DecodeDone("a", 3, 5)]
    assert [read.first for read in rank.runner.flying_halves.values()] == [0]
    rank.runner.ends = lambda: True
    rank.hear()
    assert rank.role.state.staging.halves == [None, None]
    assert not rank.role.state.busy


def test_a_cancel_for_another_attempt_changes_nothing() -> None:
    rank = Rank(DECODE)
    rank.hear(rank.decode([*range(6)], max_tokens=2))
    assert not any(isinstance(message, m.DecodeDone) for message in rank.hear(m.Cancel("a", 2)))
    assert rank.until(m.DecodeDone).request_id == "a"


def test_a_prefill_that_is_cancelled_has_failed() -> None:
    rank = Rank(PREFILL)
    told = rank.hear(prefill([*range(30)], [], store=8), m.Cancel("a", 3))
    assert told == [m.RequestFailed("a", "cancelled", False, 3, 5)]


def test_a_failed_load_ends_its_request_and_leaves_the_pool_alone() -> None:
    rank = Rank(PREFILL, breaks=lambda: "the line is cut")
    tokens = [*range(9)]
    rank.hear(prefill(tokens, rank.in_pool(tokens[:8]), store=1))
    failed = rank.until(m.RequestFailed)
    assert failed == m.RequestFailed("a", "KV could not be moved: the line is cut", False, 3, 5)


def test_a_failed_store_says_that_bytes_may_still_reach_the_pool() -> None:
    rank = Rank(PREFILL, breaks=lambda: "the line is cut")
    rank.hear(prefill([*range(9)], [], store=3))
    failed = rank.until(m.RequestFailed)
    assert failed == m.RequestFailed("a", "KV could not be moved: the line is cut", True, 3, 5)


def test_the_only_running_request_steps_back_for_one_that_is_loading() -> None:
    rank = Rank(DECODE, num_pages=7)
    rank.hear(rank.decode([*range(5)], answered=2))
    first = rank.until(m.Tokens)
    rank.runner.ends = lambda: False
    other = m.Decode(
        "b", "gateway-0", [*range(8)], 0, rank.in_pool([*range(7)]), None, [], b"", GREEDY, 2, [], []
    )
    rank.hear(other)
    preempted = rank.until(m.Preempted)
    assert preempted.token_ids[:6] == [*range(5), *first.token_ids]
    assert (preempted.answered, preempted.attempt, preempted.epoch) == (len(preempted.token_ids) - 3, 3, 5)
    rank.runner.ends = lambda: True
    assert rank.until(m.DecodeDone).request_id == "b"


def test_a_block_that_goes_back_to_the_pool_is_offered_with_what_it_hangs_on() -> None:
    prompt = [*range(15)]
    for known in (0, 3):  # a first block, and one that three others come before
        rank = Rank(DECODE)
        tokens = prompt[: known * BLOCK + 3]
        rank.hear(rank.decode(tokens, keys=prefix_keys(tokens, BLOCK, b"model"), salt=b"model"))
        wanted = rank.until(m.PutWanted)
        full = tokens + [
            token for said in rank.wire.told if isinstance(said, m.Tokens) for token in said.token_ids
        ]
        keys = prefix_keys(full, BLOCK, b"model")
        assert wanted.keys == [keys[known]]
        assert wanted.digests == [block_digests(full, BLOCK)[known]]
        assert wanted.tokens == [full[known * BLOCK : (known + 1) * BLOCK]]
        assert wanted.before == [(keys[known - 1] if known else None, known)]
        assert (wanted.rank, wanted.epoch) == (2, 5)


@pytest.mark.parametrize("problem", ["", "the line is cut"])
def test_the_end_of_a_put_says_what_is_written_and_what_may_still_be(problem: str) -> None:
    rank = Rank(DECODE)
    tokens = [*range(7)]
    rank.hear(rank.decode(tokens, keys=prefix_keys(tokens, BLOCK, b"model"), salt=b"model"))
    wanted = rank.until(m.PutWanted)
    rank.runner.breaks = lambda: problem
    (ref,) = refs_of(1, first=70)
    rank.wire.inbox.append(m.PutGranted(wanted.number, [ref]))
    ended = rank.until(m.PutEnded)
    if problem:
        assert ended == m.PutEnded([], [], [70], True, 5)
    else:
        assert (ended.object_ids, ended.failed, ended.may_still_write, ended.epoch) == ([70], [], False, 5)
        assert ended.checksums == [tuple(rank.pool[ref])]


def test_one_rank_serves_both_duties_when_it_is_given_both() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(9)]
    rank.hear(prefill(tokens, [], store=3))
    done = rank.until(m.PrefillDone)
    refs = refs_of(3)
    rank.hear(
        m.Decode(
            "a", "gateway-0", [*tokens, *done.first_tokens], 1, refs[:2], refs[2], [], b"", GREEDY, 4, [], []
        )
    )
    while not (last := rank.until(m.Tokens)).finish:
        pass
    assert last.index == 3
    assert rank.wire.told[-1] == m.DecodeDone("a", 0, 5, 0, 4, 3, 3, 10 + 11 + 12, 3 * 0.5)


def serve(tokens: list[int], load: list[m.BlockRef], **more: Any) -> m.Serve:
    return m.Serve(
        "a", "gateway-0", tokens, load, more.get("offers", False), GREEDY, more.get("max_tokens", 4), [], 0,
        {"dram": len(load) * BLOCK}, [m.Span("queue", 0, 0.5)], 3, prefix_keys(tokens, BLOCK, b"model"),
        b"model",
    )  # fmt: skip


def test_a_rank_of_both_duties_computes_a_prompt_decodes_on_and_tells_of_both() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(14)]
    rank.hear(serve(tokens, rank.in_pool(tokens[:8])))
    first = rank.until(m.Tokens)
    assert (first.index, len(first.token_ids), first.cached_tokens) == (0, 1, {"dram": 8})
    assert [(span.stage, span.count) for span in first.spans] == [("queue", 0), ("load", 2), ("compute", 6)]
    (computed,) = [said for said in rank.wire.told if isinstance(said, m.PromptComputed)]
    assert (computed.request_id, computed.computed_tokens, computed.attempt, computed.epoch) == ("a", 6, 3, 5)
    assert computed.compute_s == first.spans[2].seconds > 0
    second = rank.until(m.Tokens)
    assert (second.index, second.cached_tokens, second.spans) == (1, {}, [])
    while not (last := rank.until(m.Tokens)).finish:
        pass
    assert last.index == 3
    assert [span.stage for span in last.spans] == ["queue", "load", "compute", "decode"]
    assert rank.wire.told[-1] == m.DecodeDone("a", 3, 5, 0, 4, 3, 3, 15 + 16 + 17, 3 * 0.5)
    assert not any(isinstance(said, m.DecodeLoaded | m.PutWanted) for said in rank.wire.told)


def test_the_answer_of_one_token_ends_with_both_reports() -> None:
    rank = Rank(PREFILL, DECODE)
    rank.hear(serve([*range(6)], [], max_tokens=1))
    rank.until(m.DecodeDone)
    kinds = [type(said) for said in rank.wire.told if not isinstance(said, m.GatewayAt)]
    assert kinds == [m.PromptComputed, m.Tokens, m.DecodeDone]


def test_a_cancelled_request_leaves_a_rank_of_both_duties_at_once() -> None:
    rank = Rank(PREFILL, DECODE)
    assert rank.hear(serve([*range(30)], []), m.Cancel("a", 3)) == [m.DecodeDone("a", 3, 5)]


def test_blocks_that_are_offered_have_the_keys_of_their_place_in_the_sequence() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(10)]
    rank.hear(serve(tokens, rank.in_pool(tokens[:4]), offers=True, max_tokens=20))
    while not rank.until(m.Tokens).finish:
        pass
    full = tokens + [i for said in rank.wire.told if isinstance(said, m.Tokens) for i in said.token_ids]
    keys = prefix_keys(full, BLOCK, b"model")
    offers = [said for said in rank.wire.told if isinstance(said, m.PutWanted)]
    assert offers
    for key, before in zip(
        [key for said in offers for key in said.keys], [place for said in offers for place in said.before]
    ):
        index = keys.index(key)
        assert index >= 1, "the first block is in the pool"
        assert before == (keys[index - 1], index)


@pytest.mark.parametrize("sharing", ["hash", "radix"])
def test_a_rank_that_prefills_tells_which_blocks_its_pages_hold(sharing: str) -> None:
    rank = Rank(PREFILL, sharing=sharing)
    tokens = [*range(9)]
    keys = prefix_keys(tokens, BLOCK, b"salt")
    rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt"))
    held = rank.until(m.PagesHeld)
    assert held == m.PagesHeld(keys, [], 5)


def test_a_rank_reuses_nothing_of_its_pages_after_it_was_told_to_forget_them() -> None:
    rank = Rank(PREFILL, sharing="hash")
    tokens = [*range(9)]
    keys = prefix_keys(tokens, BLOCK, b"salt")
    for attempt, reused in ((3, 0), (4, 8)):
        rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt", attempt=attempt))
        assert rank.until(m.Tokens).cached_tokens.get("pages", 0) == reused
        rank.until(m.PrefillDone)
    rank.hear(m.ForgetPages())
    assert rank.until(m.PagesHeld).removed == keys
    rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt", attempt=5))
    assert rank.until(m.Tokens).cached_tokens.get("pages", 0) == 0


def test_each_prompt_token_is_counted_once_by_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(PREFILL, half_blocks=2, sharing="hash")
    tokens = [*range(17)]
    keys = prefix_keys(tokens, BLOCK, b"salt")

    def ask(length: int, loaded: int, attempt: int, **more: Any) -> dict[str, int]:
        load = rank.in_pool(tokens[:loaded])
        store = -(-length // BLOCK) - len(load)
        more = {"keys": keys[: length // BLOCK], "salt": b"salt", "attempt": attempt} | more
        rank.hear(prefill(tokens[:length], load, store, **more))
        cached: dict[str, int] = rank.until(m.Tokens).cached_tokens
        rank.until(m.PrefillDone)
        return cached

    assert ask(9, 4, 3) == {"dram": 4}
    assert ask(17, 12, 4) == {"pages": 8, "dram": 4}  # of the 12 in the pool, the pages have 8
    monkeypatch.setattr("scheduler.instance.continuous.worth_loading", lambda *_: False)
    rank.hear(m.ForgetPages())
    assert ask(17, 12, 5) == {"dram": 0}  # the pool offers them, and the rank computes them
    ask(17, 0, 6, answered=1)  # a resumed request was counted when it came

    monkeypatch.setattr("mooncake_lite.roles.compute_rank.REPORT_EVERY_S", 0.0)
    rank.hear()
    found = {(one.name, one.labels.get("tier")): one.value for one in rank.wire.stats[-1].metrics}
    assert found["prefix_cache_queries_total", None] == 9 + 17 + 17
    assert found["prefix_cache_hits_total", "pages"] == 8
    assert found["prefix_cache_hits_total", "dram"] == 4 + 4
    assert found["prefill_computed_tokens_total", None] == 5 + 5 + 17 + 1


def test_the_reports_gauges_are_those_of_the_duties() -> None:
    def gauges(rank: Rank) -> Iterator[str]:
        return (name for name in rank.role.rank._gauges() if name.startswith("decode_"))

    assert list(gauges(Rank(PREFILL))) == []
    assert len(list(gauges(Rank(DECODE)))) == 3


def test_a_rank_without_pages_asks_where_the_kv_may_go_writes_it_there_and_says_so() -> None:
    rank = Rank(DECODE, num_pages=6, preemption="swap")
    tokens = list(range(9))
    keys = prefix_keys(tokens[:-1], BLOCK, b"s")
    rank.hear(rank.decode(tokens, keys=keys, salt=b"s"))
    rank.hear(m.Decode("b", "gateway-0", [7], 0, [], None, [], b"", GREEDY, 30, [], []))
    wanted = rank.until(m.SwapWanted)
    assert (wanted.request_id, wanted.attempt, wanted.epoch, wanted.branch) in (
        ("a", 3, 5, 0),
        ("b", 0, 5, 0),
    )
    places = refs_of(-(-wanted.num_tokens // BLOCK), first=50)
    rank.hear(m.SwapGranted(wanted.request_id, wanted.attempt, 0, list(places)))
    swapped = rank.until(m.Swapped)
    assert len(swapped.token_ids) == wanted.num_tokens + 1
    written = [value for place in places for value in rank.pool[place]]
    assert written[: wanted.num_tokens] == kv_of(swapped.token_ids)[:-1]


def test_a_rank_whose_swap_is_not_granted_gives_the_kv_up() -> None:
    rank = Rank(DECODE, num_pages=6, preemption="swap")
    rank.hear(rank.decode(list(range(9)), attempt=3))
    rank.hear(m.Decode("b", "gateway-0", [7], 0, [], None, [], b"", GREEDY, 30, [], []))
    wanted = rank.until(m.SwapWanted)
    assert (wanted.keys, wanted.digests) == ([], [])
    rank.hear(m.SwapGranted(wanted.request_id, wanted.attempt, 0, None))
    preempted = rank.until(m.Preempted)
    assert len(preempted.token_ids) == wanted.num_tokens + 1
    assert not preempted.writing
