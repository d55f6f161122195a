"""What a class gets in lab 0: its requests, and what they really cost. Nothing of it is stored.

Used by `labs start`, `check` and `show`. The control plane that serves gives its orders to the modelled
ranks of the simulator (docs/explain/control.md). A pass takes 100 ms there, and a move 1 ms: this lab asks
for counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.control import ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.labs.timeline import Message, MessagesTrace
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.hardware import DrawnHardware
from mooncake_lite.simulator.sessions import opaque_request
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Request
from mooncake_lite.simulator.world import World
from store.keys import prefix_keys
from store.objects import BlockRef

FIRST_ID, LAST_ID = 20, 190
"""Ids of tokens that every served model has, and that none of them treats as special."""

LAYERS, KV_HEADS, HEAD_DIM, ITEMSIZE = 30, 3, 64, 4
"""KV of SmolLM2-135M in float32: the default of `serve`."""

MANY_BLOCKS = 64
"""More than the requests of a class have: nothing is evicted, and each rank moves its blocks at once."""

MESSAGES = (
    fx.StartPrefill,
    fx.StartDecode,
    ev.RequestArrived,
    ev.PrefillEnded,
    ev.DecodeLoaded,
    ev.DecodeEnded,
)
"""Orders and events that are followed (docs/explain/lifecycle.md)."""


def name_of(message: fx.Order | ev.Event) -> str:
    """Return the name of a message in a trace. A request travels in a Submit."""
    return "Submit" if isinstance(message, ev.RequestArrived) else type(message).__name__


def prompts(seed: int, sizes: dict[str, int]) -> list[list[int]]:
    """Return the token ids of each prompt: a text that all share, and then a question of its own."""
    draw = random.Random(f"{seed} prompts")

    def text(num_tokens: int) -> list[int]:
        return [draw.randint(FIRST_ID, LAST_ID) for _ in range(num_tokens)]

    shared, question = text(sizes["shared_tokens"]), sizes["question_tokens"]
    return [[*shared, FIRST_ID + number, *text(question - 1)] for number in range(sizes["requests"])]


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: the body of each request."""
    return {
        f"request_{number}.json": msgspec.json.encode(
            {"prompt": prompt, "max_tokens": sizes["answer_tokens"], "temperature": 0, "ignore_eos": True}
        )
        for number, prompt in enumerate(prompts(seed, sizes), 1)
    }


def answers(seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return {question: what the cluster of this class really does}."""
    seen = Followed(seed, sizes)
    first, last = seen.prefill["request 1"], seen.prefill[f"request {sizes['requests']}"]
    decode = seen.decode[last.request_id]
    stored = [*first.store, *([first.tail] if first.tail else [])]
    return {
        "first_rank": first.rank,
        "last_rank": last.rank,
        "decode_rank": decode.rank,
        "pool_rank": stored[0].rank,
        "stored_blocks": len(stored),
        "stored_bytes": sum(ref.nbytes for ref in stored),
        "loaded_blocks": len(last.load),
        "computed_tokens": seen.computed[last.request_id],
        "decode_blocks": len(decode.blocks) + (decode.tail is not None),
        "orders": [name_of(order) for order in seen.orders[last.request_id]],
    }


def timeline(seed: int, sizes: dict[str, int]) -> MessagesTrace:
    """Return the messages and the moves of KV of the first and the last request, for `labs show 0`."""
    seen = Followed(seed, sizes)
    wanted = ("request 1", f"request {sizes['requests']}")
    kept = [each for request, each in seen.messages if request in wanted]
    return MessagesTrace(["gateway", *(f"{rank} {role}" for rank, role in enumerate(seen.roles))], kept)


class Followed:
    """One run of the requests of a class, and what was seen of it.

    prefill, decode, orders, computed   by request
    messages                            (request, message) in their order
    """

    def __init__(self, seed: int, sizes: dict[str, int]) -> None:
        self.roles = ["conductor", *["prefill"] * sizes["prefill"], "decode", "store"]
        self.prefill: dict[str, fx.StartPrefill] = {}
        self.decode: dict[str, fx.StartDecode] = {}
        self.orders: dict[str, list[fx.Order]] = {}
        self.computed: dict[str, int] = {}
        self.messages: list[tuple[str, Message]] = []
        self._running: dict[int, str] = {}
        block_tokens = sizes["block_tokens"]
        config = ControlConfig(
            layout=(LAYERS, KV_HEADS, block_tokens, HEAD_DIM, ITEMSIZE, "none"),
            roles=self.roles,
            nodes=[0] * len(self.roles),
            policy="round-robin",
        )
        shape = Shape(
            config=config,
            segments=[MANY_BLOCKS * (role == "store") for role in self.roles],
            slots=16,
            prompts=1,
            pages=MANY_BLOCKS,
            page_tokens=block_tokens,
            budget=1 << 30,
            chunked=False,
            half_blocks=MANY_BLOCKS,
        )
        setting = Setting(
            shape=shape,
            hardware=lambda clock: Moves(clock, self),
            source=InTurn(prompts(seed, sizes), block_tokens, sizes["answer_tokens"]),
            dice=random.Random(seed),
        )
        World(setting, observe=self._observe).run()

    def _observe(self, event: ev.Event, now: float, effects: Sequence[fx.Effect]) -> None:
        """Note an event that was a message, and the orders that follow from it."""
        if isinstance(event, ev.PromptComputed):
            self._note(event.request_id, 1 + event.rank, 0, "Tokens")
        if isinstance(event, ev.DecodeEnded) and event.answer_tokens > 1:
            self._note(event.request_id, 1 + event.rank, 0, f"Tokens, {event.answer_tokens - 1} times")
        if isinstance(event, MESSAGES):
            source = 1 + event.rank if isinstance(event, ev.RankEvent) else 0
            self._note(event.request_id, source, 1, name_of(event))  # type: ignore[attr-defined]
        if isinstance(event, ev.PrefillEnded):
            self.computed[event.request_id] = event.computed_tokens
        for order in effects:
            if isinstance(order, fx.StartPrefill | fx.StartDecode):
                self.orders.setdefault(order.request_id, []).append(order)
                (self.prefill if isinstance(order, fx.StartPrefill) else self.decode)[order.request_id] = (
                    order
                )
                self._running[order.rank] = order.request_id
                self._note(order.request_id, 1, 1 + order.rank, name_of(order))

    def moved(self, rank: int, refs: Sequence[BlockRef], *, to_pool: bool) -> None:
        """Note blocks that a rank moves: from the pool to itself, or the other way.

        The hardware is told only the blocks that no pass hides; all that a prefill stores are in its order.
        """
        if refs:
            request, pool, own = self._running[rank], 1 + refs[0].rank, 1 + rank
            order = self.prefill[request]
            count = len(order.store) + (order.tail is not None) if to_pool else len(refs)
            ends = (own, pool) if to_pool else (pool, own)
            self._note(request, *ends, f"KV, {count} block{'s' * (count > 1)}")

    def _note(self, request: str, source: int, target: int, text: str) -> None:
        self.messages.append((request, Message(source, target, text, request)))


class InTurn:
    """The source of a run: each request comes when the one before has long been answered."""

    def __init__(self, prompts: list[list[int]], block_tokens: int, answer_tokens: int) -> None:
        self.num_requests = len(prompts)
        self._prompts, self._block_tokens, self._answer_tokens = prompts, block_tokens, answer_tokens
        self._sent = 0

    def next(self) -> Request:
        """Return the next request."""
        prompt = self._prompts[self._sent]
        self._sent += 1
        keys = prefix_keys(prompt, self._block_tokens)
        count = self._answer_tokens
        assert (len(prompt) + count) // self._block_tokens == len(keys), "an answer fills a block"
        return opaque_request(
            f"request {self._sent}", keys, self._block_tokens, len(prompt), count, count, after_s=10.0
        )


class Moves(DrawnHardware):
    """Hardware on which it pays to load, and that notes which blocks move."""

    def __init__(self, clock: Clock, seen: Followed) -> None:
        super().__init__(clock, random.Random(0))
        self._clock, self._seen = clock, seen

    def pass_s(self, rank: int, load: PassLoad) -> float:
        """Return 100 ms."""
        return 0.1

    def read(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Note blocks that come from the pool."""
        self._seen.moved(rank, refs, to_pool=False)
        self._clock.after(0.001, done)

    def write(self, rank: int, refs: Sequence[BlockRef], done: Action, least_s: float = 0.0) -> None:
        """Note blocks that go to the pool, once: their first layers beside a pass, and then the last."""
        if not least_s:
            self._seen.moved(rank, refs, to_pool=True)
        self._clock.after(0.001, done)
