"""What the conductor knows of one request, and the messages that follow from it. No decisions."""

from __future__ import annotations

from mooncake_lite.messages import BlockRef, Decode, Prefill, PrefillDone, Span, Submit
from scheduler import Placement


class RequestRecord:
    """A request between Submit and its end.

        token_ids   the prompt, and after a preemption the answer so far behind it
        keys, digests   of the full blocks of token_ids; empty when reuse is off
        stage       waiting -> [promoting ->] prefill -> loading -> decode; preempted: waiting again
        load        pool objects of the reused prefix, in order
        store       pool objects that prefill writes, in order; load + store are all full blocks
        tail        pool object of the last, partial block
        awaiting    objects that are being read from SSD, by number of LoadBlocks
        problem     why one of them cannot be, for another reason than its bytes

    Owner of all its pool objects and leases in the directory: request_id.
    """

    def __init__(self, submit: Submit, now: float) -> None:
        self.submit = submit
        self.request_id = submit.request_id
        self.token_ids = submit.token_ids
        self.keys = list(submit.keys)
        self.digests = list(submit.digests)
        self.answered = 0
        self.stage = "waiting"
        self.cancelled = False
        self.prefill = -1
        self.decode = -1
        self.spans: list[Span] = []
        self._waiting_since = now
        self.reset()

    def reset(self) -> None:
        """Nothing is allocated or leased."""
        self.stage = "waiting"
        self.load: list[BlockRef] = []
        self.store: list[BlockRef] = []
        self.tail: BlockRef | None = None
        self.awaiting: dict[int, list[BlockRef]] = {}
        self.bad_blocks = 0
        self.problem = ""
        self.cached: dict[str, int] = {}

    def begin(self, placement: Placement, now: float) -> None:
        """Its turn has come."""
        self.reset()
        self.prefill, self.decode = placement.prefill, placement.decode
        self.spans = [span for span in self.spans if span.stage != "queue"]
        self.spans.append(Span("queue", 0, now - self._waiting_since))

    def count_cached(self, block_tokens: int, from_ssd: set[int]) -> None:
        """Reused prompt tokens by tier; the last token of a full hit is computed all the same."""
        counts = {"dram": 0, "ssd": 0}
        for index in range(len(self.load)):
            tokens = min(block_tokens, len(self.token_ids) - 1 - index * block_tokens)
            counts["ssd" if index in from_ssd else "dram"] += tokens
        self.cached = counts

    def key_of(self, ref: BlockRef) -> int:
        """The prefix key of one of the blocks to load."""
        return self.keys[self.load.index(ref)]

    def prefill_message(self) -> Prefill:
        """What its prefill rank is told; everything has been allocated and leased."""
        submit = self.submit
        return Prefill(
            self.request_id, submit.gateway, self.token_ids, self.load, self.store, self.tail,
            submit.sampling, submit.max_tokens, submit.stop_ids, self.answered,
            {} if self.answered else self.cached, self.spans,
        )  # fmt: skip

    def first_token(self, done: PrefillDone) -> None:
        """Prefill has ended: the token it sampled is part of the sequence now."""
        self.token_ids = [*self.token_ids, done.first_token]
        self.answered += 1
        self.spans = done.spans

    def decode_message(self, salt: bytes) -> Decode:
        """What its decode rank is told after PrefillDone; an empty salt: blocks are not to go back."""
        submit = self.submit
        return Decode(
            self.request_id, submit.gateway, self.token_ids, self.answered, self.load + self.store,
            self.tail, self.keys, salt, submit.sampling, submit.max_tokens, submit.stop_ids, self.spans,
        )  # fmt: skip

    def extend(self, token_ids: list[int], answered: int) -> None:
        """Preempted: what was answered becomes part of what is prefilled next."""
        self.reset()
        self.token_ids = token_ids
        self.answered = answered
