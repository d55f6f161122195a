"""A computing rank as a conversation: orders in, messages out, with a runner that has no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.ranks.computing.build import new_drafter_of
from mooncake_lite.ranks.computing.jobs import job_of
from mooncake_lite.ranks.computing.machine import ComputingRank, NewTerm, Order, Told
from scheduler.instance import DECODE, PREFILL, Limits, Pages, Preemption, Staging, State, new_prefix_cache
from scheduler.instance.lookup import Lookup
from scheduler.instance.sequence import Sequence as TokenSequence
from store.keys import block_digests, next_key, prefix_keys
from tests.mooncake_lite.conductor.wording import kind
from tests.scheduler.instance.model_runner import BLOCK, PAGE, ModelRunner, kv_of
from tests.scheduler.instance.test_drafts import Wrong

pytestmark = pytest.mark.quick

GREEDY = m.Sampling(0.0)
QUEUED_S = 0.5


class Rank:
    """Rank 2 in its sixth life: `hear` delivers orders and returns what is told in one turn.

    A turn without orders looks at the clock twice: from one forward pass to the next it takes half a second.
    """

    def __init__(
        self, *duties: str, num_pages: int = 64, half_blocks: int = 1, sharing: str = "off",
        preemption: Preemption = "recompute", **runner: Any,
    ) -> None:  # fmt: skip
        self.told: list[Any] = []
        self._seen = 0
        self._now = 0.0
        self.pool: dict[Any, Any] = {}
        self.model = ModelRunner(self.pool, num_pages, half_blocks, 3, **runner)
        self.runner: Any = self.model
        pages, staging = Pages(num_pages, PAGE), Staging(half_blocks, 3)
        prefix = new_prefix_cache(sharing, pages, BLOCK)
        state = State(
            frozenset(duties), pages, staging, BLOCK, Limits(8), next_key=next_key, prefix=prefix,
            preemption=preemption,
        )  # fmt: skip
        self.machine = ComputingRank(m.RankHello(2, "decode", 0, epoch=5), state, 1000)

    def look(self) -> float:
        """Look at the clock."""
        self._now += 0.25
        return self._now

    def hear(self, *orders: Order) -> list[Any]:
        before = len(self.told)
        for order in orders:
            self.tell(self.machine.on(order, self.look()))
        step = self.machine.step(self.look())
        self.tell(self.machine.ended(self.runner.run(step), self.look()))
        self.machine.state.check()
        return self.told[before:]

    def tell(self, told: Sequence[Told]) -> None:
        """Keep messages. Those with tokens of an answer go to the gateway, and no others."""
        for message, gateway, times_s in told:
            assert gateway == ("gateway-0" if isinstance(message, m.Tokens) else "")
            assert times_s == ()
            self.told.append(message)

    def until(self, wanted: type) -> Any:
        """Go on until a message of this kind is told; return the first one that was not returned before."""
        for _ in range(200):
            while self._seen < len(self.told):
                self._seen += 1
                if kind(self.told[self._seen - 1]) is wanted:
                    return self.told[self._seen - 1]
            self.hear()
        raise AssertionError(f"no {wanted.__name__}")

    def all(self, wanted: type) -> list[Any]:
        """Return every message of this kind that was told."""
        return [message for message in self.told if kind(message) is wanted]

    @property
    def answer(self) -> list[int]:
        """Tokens that gateways have."""
        return [token for said in self.all(m.Tokens) for token in said.token_ids]

    def in_pool(self, tokens: list[int]) -> list[m.BlockRef]:
        """Put the blocks of these tokens into the pool."""
        kv = kv_of(tokens)
        refs = refs_of(-(-len(tokens) // BLOCK), first=100 + len(self.pool))
        for index, ref in enumerate(refs):
            block = kv[index * BLOCK : (index + 1) * BLOCK]
            self.pool[ref] = block + [None] * (BLOCK - len(block))
        return refs

    def decode(self, tokens: list[int], **more: Any) -> m.Start:
        """An order for tokens of which all but the last have their KV in the pool."""
        return decode("a", tokens, self.in_pool(tokens[:-1]), **more)


def refs_of(count: int, first: int = 1) -> list[m.BlockRef]:
    return [m.BlockRef(first + n, 3, 1000 * n, 512) for n in range(count)]


def body(tokens: list[int], **more: Any) -> m.Body:
    values = {"salt": b"", "sampling": GREEDY, "stop_ids": [], "max_tokens": 30} | more
    return m.Body("gateway-0", tokens, **values)


def decode(
    name: str, tokens: list[int], blocks: list[m.BlockRef], tail: m.BlockRef | None = None, attempt: int = 3,
    **more: Any,
) -> m.Start:  # fmt: skip
    order = m.StartDecode(2, name, attempt, blocks, tail, [0])
    spans, offers = [m.Span("queue", 0, QUEUED_S)], bool(more.get("salt"))
    return m.Start(order, body(tokens, offers=offers, spans=spans, **more))


def prefill(
    tokens: list[int], load: list[m.BlockRef], store: int, attempt: int = 3,
    promoted: list[tuple[int, float, int, int]] = [], reads: bool = True, **more: Any,  # noqa: B006
) -> m.Start:  # fmt: skip
    refs = refs_of(store)
    tail = refs.pop() if len(tokens) % BLOCK else None
    cached = {"dram": len(load) * BLOCK}
    order = m.StartPrefill(2, "a", attempt, load, refs, tail, cached, QUEUED_S, promoted, reads)
    return m.Start(order, body(tokens, **more))


def serve(tokens: list[int], load: list[m.BlockRef], **more: Any) -> m.Start:
    order = m.StartServe(2, "a", 3, load, {"dram": len(load) * BLOCK}, QUEUED_S, [])
    values = {"salt": b"model", "keys": prefix_keys(tokens, BLOCK, b"model"), "max_tokens": 4} | more
    return m.Start(order, body(tokens, **values))


CANCEL = m.CancelOn(2, "a", 3)
ABOUT = 2, 5, "a", 3
"""The first fields of events about the request of these orders."""


def test_a_prefill_tells_its_token_at_once_and_its_end_when_every_byte_is_in_the_pool() -> None:
    rank = Rank(PREFILL)
    tokens = [*range(14)]
    load = rank.in_pool(tokens[:8])
    rank.hear(prefill(tokens, load, store=2))
    token = rank.until(m.Tokens)
    assert rank.pool.keys() == set(load)
    assert (token.index, len(token.token_ids), token.cached_tokens) == (0, 1, {"dram": 8})
    assert [(span.stage, span.count) for span in token.spans] == [("queue", 0), ("load", 2), ("compute", 6)]
    report = rank.until(m.PrefillEnded)
    done, spans = report.event, report.spans
    assert report.token_ids == [token.token_ids]
    assert (done.rank, done.epoch, done.request_id, done.attempt, done.finished) == (*ABOUT, [])
    assert done.checksums == [tuple(kv_of(tokens)[8:12])]
    assert [span.stage for span in spans] == ["queue", "load", "compute", "store"]
    assert (spans[3].nbytes, spans[3].count) == (1024, 2)
    assert (done.load_s, done.compute_s, done.store_s) == tuple(span.seconds for span in spans[1:])
    assert (done.computed_tokens, done.loaded_blocks) == (6, 2)


def test_the_spans_of_an_order_come_before_those_of_the_rank() -> None:
    rank = Rank(PREFILL)
    earlier, promoted = m.Span("decide", 0, 0.1), [(3, 0.2, 512, 1)]
    rank.hear(prefill([*range(14)], [], store=4, promoted=promoted, spans=[earlier]))
    first = [earlier, m.Span("queue", 0, QUEUED_S), m.Span("promote", 3, 0.2, 512, 1)]
    assert rank.until(m.Tokens).spans[:3] == first
    spans = rank.until(m.PrefillEnded).spans
    assert spans[:3] == first
    assert [span.stage for span in spans[3:]] == ["load", "compute", "store"]


def test_a_prefill_for_no_token_stores_its_blocks_and_ends_without_one() -> None:
    rank = Rank(PREFILL)
    tokens = [*range(14)]
    rank.hear(prefill(tokens, [], store=4, max_tokens=0))
    told = rank.until(m.Tokens)
    assert (told.index, told.token_ids, told.finish, told.cached_tokens) == (0, [], "length", {"dram": 0})
    done = rank.until(m.PrefillEnded).event
    assert done.finished == [0]
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
    done = rank.until(m.PrefillEnded).event
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
    done = rank.told[-1]
    assert done == m.DecodeEnded(*ABOUT, 0, 2, 2, 2, 6 + 7, 2 * 0.5)


def test_a_cancel_while_loading_is_answered_at_once_and_the_other_groups_are_not_fetched() -> None:
    """The loop used to wait for the whole load, for up to 60 s, while the running batch stood still."""
    rank = Rank(DECODE, ends=lambda: False)
    rank.hear(rank.decode([*range(17)]))
    assert rank.hear(CANCEL) == [m.DecodeEnded(*ABOUT)]
    assert [read.first for read in rank.model.flying_halves.values()] == [0]
    rank.model.ends = lambda: True
    rank.hear()
    assert rank.machine.state.staging.halves == [None, None]
    assert not rank.machine.state.busy


def test_a_prefill_that_is_cancelled_has_failed() -> None:
    rank = Rank(PREFILL)
    told = rank.hear(prefill([*range(30)], [], store=8), CANCEL)
    assert told == [m.RequestFailed(*ABOUT, "cancelled")]


def test_blocks_that_cannot_be_loaded_twice_are_computed_or_the_request_fails() -> None:
    problems = ["", "the line is cut", "the line is cut"]  # of the transfers, the last one first
    rank = Rank(PREFILL, breaks=problems.pop)
    tokens = [*range(9)]
    rank.hear(prefill(tokens, rank.in_pool(tokens[:8]), store=1))
    ended = rank.until(m.PrefillEnded).event
    assert (problems, ended.computed_tokens, ended.loaded_blocks) == ([], 9, 0)
    decoding = Rank(DECODE, breaks=lambda: "the line is cut")
    decoding.hear(decoding.decode(tokens))
    failed = decoding.until(m.RequestFailed)
    assert failed == m.RequestFailed(*ABOUT, "KV could not be moved: the line is cut")


def test_a_transfer_that_fails_once_is_begun_again() -> None:
    problems = ["the line is cut"]
    rank = Rank(PREFILL, breaks=lambda: problems.pop() if problems else "")
    tokens = [*range(9)]
    rank.hear(prefill(tokens, rank.in_pool(tokens[:8]), store=1))
    ended = rank.until(m.PrefillEnded).event
    assert (ended.computed_tokens, ended.loaded_blocks) == (1, 2)


def test_a_failed_store_says_that_bytes_may_still_reach_the_pool() -> None:
    rank = Rank(PREFILL, breaks=lambda: "the line is cut")
    rank.hear(prefill([*range(9)], [], store=3))
    failed = rank.until(m.RequestFailed)
    assert failed == m.RequestFailed(*ABOUT, "KV could not be moved: the line is cut", True)


def test_a_block_that_goes_back_to_the_pool_is_offered_with_what_it_hangs_on() -> None:
    prompt = [*range(15)]
    for known in (0, 3):  # a first block, and one that three others come before
        rank = Rank(DECODE)
        tokens = prompt[: known * BLOCK + 3]
        rank.hear(rank.decode(tokens, keys=prefix_keys(tokens, BLOCK, b"model"), salt=b"model"))
        report = rank.until(m.PutsWanted)
        full = tokens + rank.answer
        keys, before = prefix_keys(full, BLOCK, b"model"), keys_before(known, full)
        assert report.token_ids == [full[known * BLOCK : (known + 1) * BLOCK]]
        assert report.event == m.PutsWanted(
            2, 5, report.event.number, [keys[known]], [block_digests(full, BLOCK)[known]], [before], ["a"]
        )


def keys_before(index: int, tokens: list[int]) -> tuple[int | None, int]:
    """The key of the block before this one, and the number of blocks before it."""
    return (prefix_keys(tokens, BLOCK, b"model")[index - 1] if index else None, index)


@pytest.mark.parametrize("problem", ["", "the line is cut"])
def test_the_end_of_a_put_says_what_is_written_and_what_may_still_be(problem: str) -> None:
    rank = Rank(DECODE)
    tokens = [*range(7)]
    rank.hear(rank.decode(tokens, keys=prefix_keys(tokens, BLOCK, b"model"), salt=b"model"))
    wanted = rank.until(m.PutsWanted).event
    rank.model.breaks = lambda: problem
    (ref,) = refs_of(1, first=70)
    rank.hear(m.GrantPuts(2, wanted.number, [ref]))
    ended = rank.until(m.PutsEnded)
    if problem:
        assert ended == m.PutsEnded(2, 5, wanted.number, [], [], [70], True)
    else:
        assert (ended.object_ids, ended.failed, ended.may_still_write, ended.epoch) == ([70], [], False, 5)
        assert ended.checksums == [tuple(rank.pool[ref])]


def test_a_new_conductor_is_joined_when_the_puts_of_the_last_one_have_ended() -> None:
    flies = True
    rank = Rank(DECODE, ends=lambda: not flies)
    tokens = [*range(7)]
    rank.hear(decode("a", tokens[:1], [], keys=prefix_keys(tokens, BLOCK, b"model"), salt=b"model"))
    wanted = rank.until(m.PutsWanted).event
    rank.hear(m.GrantPuts(2, wanted.number, refs_of(1, first=70)))
    assert rank.model.flying_puts
    rank.hear(NewTerm(6))
    rank.hear()
    assert rank.all(m.RankHello) == []
    flies = False
    assert rank.until(m.RankHello).epoch == 6
    assert not rank.model.flying_puts


def test_one_rank_serves_both_duties_when_it_is_given_both() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(9)]
    rank.hear(prefill(tokens, [], store=3))
    ((first,),) = rank.until(m.PrefillEnded).token_ids
    refs = refs_of(3)
    rank.hear(decode("a", [*tokens, first], refs[:2], refs[2], attempt=0, answered=1, max_tokens=4))
    while not (last := rank.until(m.Tokens)).finish:
        pass
    assert last.index == 3
    assert rank.told[-1] == m.DecodeEnded(2, 5, "a", 0, 0, 4, 3, 3, 10 + 11 + 12, 3 * 0.5)


def test_the_conductor_hears_of_drafts_as_rows_of_a_step_and_not_as_tokens() -> None:
    rank = Rank(PREFILL, DECODE)
    rank.machine.state.new_drafter = partial(Wrong, 1)
    rank.hear(serve([*range(14)], []))
    ended = rank.until(m.DecodeEnded)
    assert ended == m.DecodeEnded(*ABOUT, 0, 4, 3, 4, 15 + 16 + 16 + 17, 3 * 0.5)
    counted = {name: rank.machine.counters[name] for name in rank.machine.counters if "dec" in name}
    assert counted == {
        "decode_tokens_total": 3, "decode_iterations_total": 3, "decode_rows_total": 4,
        "decode_seconds_total": 1.5, "spec_decode_num_drafts_total": 1,
        "spec_decode_num_draft_tokens_total": 1, "spec_decode_num_accepted_tokens_total": 0,
    }  # fmt: skip


def test_a_rank_makes_drafts_as_its_configuration_says() -> None:
    model: Any = SimpleNamespace(vocab_size=50)
    job = job_of(serve([*range(14)], []), 1000)
    for speculate in ("off", "prompt-lookup"):  # requests may ask for drafts in both cases
        assert new_drafter_of(ServeConfig(speculate=speculate), model) is Lookup
    assert new_drafter_of(ServeConfig(engine="emulated"), model) is None
    new_drafter = new_drafter_of(ServeConfig(engine="emulated", speculate="1"), model)
    assert new_drafter is not None
    drafts, predicted = new_drafter(job, 0).after(TokenSequence([*range(14)], 1, 99, 99, frozenset()), 3)
    assert (len(drafts), predicted) == (3, False)
    assert all(0 <= token < 50 for token in drafts)


def test_a_rank_of_both_duties_computes_a_prompt_decodes_on_and_tells_of_both() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(14)]
    rank.hear(serve(tokens, rank.in_pool(tokens[:8])))
    first = rank.until(m.Tokens)
    assert (first.index, len(first.token_ids), first.cached_tokens) == (0, 1, {"dram": 8})
    assert [(span.stage, span.count) for span in first.spans] == [("queue", 0), ("load", 2), ("compute", 6)]
    (computed,) = [said for said in rank.told if isinstance(said, m.PromptComputed)]
    assert (computed.request_id, computed.computed_tokens, computed.attempt, computed.epoch) == ("a", 6, 3, 5)
    assert computed.compute_s == first.spans[2].seconds > 0
    second = rank.until(m.Tokens)
    assert (second.index, second.cached_tokens, second.spans) == (1, {}, [])
    while not (last := rank.until(m.Tokens)).finish:
        pass
    assert last.index == 3
    assert [span.stage for span in last.spans] == ["queue", "load", "compute", "decode"]
    assert rank.told[-1] == m.DecodeEnded(*ABOUT, 0, 4, 3, 3, 15 + 16 + 17, 3 * 0.5)
    assert rank.all(m.DecodeLoaded) + rank.all(m.PutsWanted) == []


def test_the_answer_of_one_token_ends_with_both_reports() -> None:
    rank = Rank(PREFILL, DECODE)
    rank.hear(serve([*range(6)], [], max_tokens=1))
    rank.until(m.DecodeEnded)
    assert [type(said) for said in rank.told] == [m.PromptComputed, m.Tokens, m.DecodeEnded]


def test_a_cancelled_request_leaves_a_rank_of_both_duties_at_once() -> None:
    rank = Rank(PREFILL, DECODE)
    assert rank.hear(serve([*range(30)], []), CANCEL) == [m.DecodeEnded(*ABOUT)]


def test_blocks_that_are_offered_have_the_keys_of_their_place_in_the_sequence() -> None:
    rank = Rank(PREFILL, DECODE)
    tokens = [*range(10)]
    rank.hear(serve(tokens, rank.in_pool(tokens[:4]), offers=True, max_tokens=20))
    while not rank.until(m.Tokens).finish:
        pass
    full = tokens + rank.answer
    keys = prefix_keys(full, BLOCK, b"model")
    offers = [report.event for report in rank.all(m.PutsWanted)]
    assert offers
    for offer in offers:
        for key, before in zip(offer.keys, offer.before, strict=True):
            index = keys.index(key)
            assert index >= 1, "the first block is in the pool"
            assert before == keys_before(index, full)


@pytest.mark.parametrize("sharing", ["hash", "radix"])
def test_a_rank_that_prefills_tells_each_conductor_which_blocks_its_pages_hold(sharing: str) -> None:
    rank = Rank(PREFILL, sharing=sharing)
    tokens = [*range(9)]
    keys = prefix_keys(tokens, BLOCK, b"salt")
    rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt"))
    held = rank.until(m.PagesChanged)
    assert held == m.PagesChanged(2, 5, keys, [])
    rank.until(m.PrefillEnded)
    rank.hear(NewTerm(6))
    assert rank.until(m.PagesChanged) == m.PagesChanged(2, 6, keys, []), "a new conductor hears it, too"


def test_a_rank_reuses_nothing_of_its_pages_after_it_was_told_to_forget_them() -> None:
    rank = Rank(PREFILL, sharing="hash")
    tokens = [*range(9)]
    keys = prefix_keys(tokens, BLOCK, b"salt")
    for attempt, reused in ((3, 0), (4, 8)):
        rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt", attempt=attempt))
        assert rank.until(m.Tokens).cached_tokens.get("pages", 0) == reused
        rank.until(m.PrefillEnded)
    rank.hear(m.ForgetPages(2))
    assert rank.until(m.PagesChanged).removed == keys
    rank.hear(prefill(tokens, [], store=3, keys=keys, salt=b"salt", attempt=5))
    assert rank.until(m.Tokens).cached_tokens.get("pages", 0) == 0


def test_each_prompt_token_is_counted_once_by_where_it_came_from() -> None:
    rank = Rank(PREFILL, half_blocks=2, sharing="hash")
    tokens = [*range(17)]
    keys = prefix_keys(tokens, BLOCK, b"salt")

    def ask(length: int, loaded: int, attempt: int, **more: Any) -> dict[str, int]:
        load = rank.in_pool(tokens[:loaded])
        store = -(-length // BLOCK) - len(load)
        more = {"keys": keys[: length // BLOCK], "salt": b"salt", "attempt": attempt} | more
        rank.hear(prefill(tokens[:length], load, store, **more))
        cached: dict[str, int] = rank.until(m.Tokens).cached_tokens
        rank.until(m.PrefillEnded)
        return cached

    assert ask(9, 4, 3) == {"dram": 4}
    assert ask(17, 12, 4) == {"pages": 8, "dram": 4}  # of the 12 in the pool, the pages have 8
    rank.hear(m.ForgetPages(2))
    assert ask(17, 12, 5, reads=False) == {"dram": 0}  # the pool offers them, and the rank computes them
    assert ask(17, 0, 6, answered=1) == {}  # a resumed request was counted when it came

    assert rank.machine.counters["prefix_cache_queries_total"] == 9 + 17 + 17
    assert rank.machine.counters["prefill_computed_tokens_total"] == 5 + 5 + 17 + 1
    assert rank.machine.reused == {"pages": 8, "dram": 4 + 4}


def out_of_pages(keys: list[int], salt: bytes) -> tuple[Rank, m.SwapWanted]:
    """A rank with no free page, two requests that decode, and what it asks for one of them."""
    rank = Rank(DECODE, num_pages=6, preemption="swap")
    rank.hear(rank.decode(list(range(9)), keys=keys, salt=salt))
    rank.hear(decode("b", [7], [], attempt=0))
    wanted = rank.until(m.SwapWanted)
    assert (wanted.rank, wanted.epoch, wanted.request_id, wanted.attempt, wanted.branch) in (
        (*ABOUT, 0),
        (2, 5, "b", 0, 0),
    )
    return rank, wanted


def test_a_rank_without_pages_asks_where_the_kv_may_go_writes_it_there_and_says_so() -> None:
    rank, wanted = out_of_pages(prefix_keys(range(8), BLOCK, b"s"), b"s")
    places = refs_of(-(-wanted.num_tokens // BLOCK), first=50)
    rank.hear(m.GrantSwap(2, wanted.request_id, wanted.attempt, 0, list(places)))
    report = rank.until(m.Swapped)
    (tokens,), swapped = report.token_ids, report.event
    assert (swapped.request_id, swapped.num_tokens) == (wanted.request_id, len(tokens))
    assert len(tokens) == wanted.num_tokens + 1
    salt = b"s" if swapped.request_id == "a" else b""
    assert swapped.keys == (prefix_keys(tokens, BLOCK, salt) if salt else [])
    assert swapped.digests == (block_digests(tokens, BLOCK) if salt else [])
    written = [value for place in places for value in rank.pool[place]]
    assert written[: wanted.num_tokens] == kv_of(tokens)[:-1]


def test_a_rank_whose_swap_is_not_granted_gives_the_kv_up() -> None:
    rank, wanted = out_of_pages([], b"")
    assert (wanted.keys, wanted.digests) == ([], [])
    rank.hear(m.GrantSwap(2, wanted.request_id, wanted.attempt, 0, None))
    preempted = rank.until(m.Preempted)
    assert len(preempted.token_ids[0]) == preempted.event.num_tokens == wanted.num_tokens + 1
    assert not preempted.event.may_still_write


def test_a_preempted_request_is_named_by_the_keys_and_digests_of_its_full_blocks() -> None:
    rank = Rank(DECODE, num_pages=6)
    tokens = list(range(9))
    for name, attempt in (("a", 3), ("b", 0)):
        keys = prefix_keys(tokens, BLOCK, b"s")
        rank.hear(decode(name, tokens, rank.in_pool(tokens[:-1]), attempt=attempt, keys=keys, salt=b"s"))
    report = rank.until(m.Preempted)
    (said,) = report.token_ids
    assert len(said) >= len(tokens)
    assert report.event.keys == prefix_keys(said, BLOCK, b"s")
    assert report.event.digests == block_digests(said, BLOCK)


def test_a_rank_that_is_asked_lists_the_requests_that_it_has() -> None:
    rank = Rank(DECODE)
    rank.hear(rank.decode([*range(6)], max_tokens=3), decode("b", [7], [], attempt=0))
    assert rank.hear(m.ListOpen(2, 7))[0] == m.OpenListed(2, 5, 7, [("a", 3), ("b", 0)])
    rank.hear(m.CancelOn(2, "b", 0))
    assert rank.hear(m.ListOpen(2, 8))[0] == m.OpenListed(2, 5, 8, [("a", 3)])
    while rank.until(m.DecodeEnded).request_id != "a":
        pass
    assert rank.hear(m.ListOpen(2, 9)) == [m.OpenListed(2, 5, 9, [])]
