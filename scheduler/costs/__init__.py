"""Costs: what a request would take, predicted from a profile and corrected by what is measured.

Kept by `scheduler.state`; asked by placement, admission and the simulator. One file for each cost. Pure.
Numbers and NumPy columns are taken alike; the factors of instances are a column too. Explained in
docs/explain/costs.md.

    TTFT = queue + fetch + messages + prefill
           fetch = transfer from other nodes + load from DRAM + load from SSD
    TBT  = decode step with the request in the batch
"""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec

from scheduler.columns import Column
from scheduler.costs.decode import DecodeCost
from scheduler.costs.lengths import Lengths
from scheduler.costs.load import LoadCost, Tier
from scheduler.costs.prefill import PrefillCost
from scheduler.costs.refine import LIMIT, Average, Corrections
from scheduler.costs.transfer import TransferCost

FULL_TOKENS, FULL_STEPS, FULL_NBYTES = 256, 16, 2**24
"""Prompt tokens, decode steps and bytes from which a measurement has its full weight.

Fixed costs and noise are a larger part of smaller measurements. Any values of this order work.
"""


class CostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The costs before any correction: plain data, part of ControlConfig and of every recording.

    is_guess   nothing was measured: placement compares defaults, and no request is refused because of them
    """

    prefill: PrefillCost = PrefillCost(0.0, 0.005)
    decode: DecodeCost = DecodeCost(0.05, 0.0, 0.0)
    transfer: TransferCost = TransferCost(1e9, 1e-3)
    load: LoadCost = LoadCost(5e9, 1e9, 1e-3)
    is_guess: bool = True


class Costs:
    """Predictions, and the corrections that make them follow what is measured.

    config    the costs before any correction
    lengths   of answers

    `instance` is a number or a column, as the other arguments are. Its predictions are multiplied by
    measured / predicted of that instance; without measurements of it, by that of all instances.
    """

    def __init__(self, config: CostConfig) -> None:
        self.config = config
        self.lengths = Lengths()
        limit = inf if config.is_guess else LIMIT
        load, transfer = config.load, config.transfer
        self._message, self._slot = Average(), Average()
        self._prefill = Corrections(config.prefill.seconds(FULL_TOKENS, 0), limit)
        self._step = Corrections(FULL_STEPS * config.decode.step_s(1, 0), limit)
        self._transfer = Corrections(transfer.seconds(FULL_NBYTES), limit)
        self._load = {
            "dram": Corrections(load.seconds("dram", FULL_NBYTES), limit),
            "ssd": Corrections(load.seconds("ssd", FULL_NBYTES), limit),
        }

    @property
    def is_measured(self) -> bool:
        """Tell whether times of prefill rest on a measurement: a profile, or one of this cluster."""
        return not self.config.is_guess or self._prefill.is_measured

    @property
    def is_fetch_measured(self) -> bool:
        """Tell whether times of loads rest on a measurement: a profile, or one of this cluster."""
        return not self.config.is_guess or self._transfer.is_measured or self._load["dram"].is_measured

    @property
    def is_step_measured(self) -> bool:
        """Tell whether times of decode steps rest on a measurement: a profile, or one of this cluster."""
        return not self.config.is_guess or self._step.is_measured

    # ------------------------------------------------------------------------------ predictions

    def prefill_s(self, instance: Column, num_tokens: Column, cached: Column) -> Any:
        """Predict the computing of a prompt with a cached prefix. See PrefillCost.seconds."""
        return self._prefill.of(instance) * self.config.prefill.seconds(num_tokens, cached)

    def slot_s(self, instance: Column, pending_s: Column) -> Any:
        """Predict for how long requests take a prefill slot, from the seconds of their prefills.

        pending_s   on an instance; see PrefillInstance.waiting_s

        A slot is also taken during loads, stores and messages.
        """
        return self._prefill.of(instance) * pending_s * self._slot_ratio

    def held_s(self, pending_s: float) -> float:
        """Predict the same of requests that no instance has yet."""
        return self._prefill.of_all * pending_s * self._slot_ratio

    @property
    def _slot_ratio(self) -> float:
        """Predict for how long a prefill takes its slot, as a multiple of its computing."""
        return self._slot.value if self._slot.is_measured else 1.0

    def recompute_s(self, num_tokens: int, cached: int) -> float:
        """Predict what computing these tokens adds to a prefill: the price of losing their KV."""
        return self._prefill.of_all * float(self.config.prefill.marginal_s(num_tokens, cached))

    def step_s(self, instance: Column, batch: Column, context_tokens: Column) -> Any:
        """Predict a decode step. See DecodeCost.step_s."""
        return self._step.of(instance) * self.config.decode.step_s(batch, context_tokens)

    def transfer_s(self, instance: Column, nbytes: Column, flows: Column = 0) -> Any:
        """Predict a transfer to an instance. See TransferCost.seconds."""
        return self._transfer.of(instance) * self.config.transfer.seconds(nbytes, flows)

    def rack_transfer_s(self, instance: Column, nbytes: Column, flows: Column = 0) -> Any:
        """Predict a transfer to an instance from a node of its rack. See TransferCost.rack_seconds."""
        return self._transfer.of(instance) * self.config.transfer.rack_seconds(nbytes, flows)

    def load_s(self, instance: Column, tier: Tier, nbytes: Column) -> Any:
        """Predict a load: "dram" by an instance, "ssd" by the store rank of this number."""
        return self._load[tier].of(instance) * self.config.load.seconds(tier, nbytes)

    def mean_load_s(self, tier: Tier, nbytes: int) -> float:
        """Predict a load of an instance that is like all of them together."""
        return self._load[tier].of_all * float(self.config.load.seconds(tier, nbytes))

    def fetch_s(
        self, instance: Column, near: Column, far: Column = 0, flows: Column = 0, ssd: Column = 0
    ) -> Any:
        """Predict how long an instance waits until a prefix is in its pages.

        near    bytes in DRAM of its node
        far     bytes in DRAM of another node; flows: transfers that the sender has under way already
        ssd     bytes of `near` and `far` that must come from SSD before

        Blocks from another node land in pages while the next ones are on their way: a byte is near or far.
        """
        seconds = self.load_s(instance, "dram", near) + self.transfer_s(instance, far, flows)
        return seconds + self._load["ssd"].of_all * self.config.load.seconds("ssd", ssd)

    @property
    def message_s(self) -> float:
        """Predict the part of a prefill that its rank does not report: messages, and passes of others."""
        return self._message.value if self._message.is_measured else 0.0

    def mean_step_s(self, batch: float, context_tokens: float) -> float:
        """Predict a decode step of an instance that is like all of them together."""
        return self._step.of_all * float(self.config.decode.step_s(batch, context_tokens))

    def tbt_s(
        self, instance: Column, batch: Column, context_tokens: Column, num_tokens: float, n: int = 1
    ) -> Any:
        """Predict the time between tokens on an instance that also gets a request of n answers.

        batch, context_tokens   of the instance now
        num_tokens              of the prompt
        """
        return self.step_s(instance, batch + n, context_tokens + n * num_tokens)

    # ------------------------------------------------------------------------------ measurements

    def measured_prefill(self, instance: int, num_tokens: int, cached: int, compute_s: float) -> None:
        """Add a measured prefill. compute_s includes neither loads nor stores."""
        if cached < num_tokens:
            self._prefill.measured(instance, self.config.prefill.seconds(num_tokens, cached), compute_s)

    def measured_slot(self, num_tokens: int, cached: int, compute_s: float, seconds: float) -> None:
        """Add for how many seconds a measured prefill took its slot, which no other one shared."""
        full_s = self.config.prefill.seconds(FULL_TOKENS, 0)
        if compute_s > 0 < full_s:
            size = self.config.prefill.seconds(num_tokens, cached) / full_s
            self._slot.add(min(max(seconds / compute_s, 1.0), LIMIT), size)

    def measured_messages(self, seconds: float) -> None:
        """Add a measured prefill's time from its order to its report, without what its rank reports."""
        self._message.add(max(0.0, seconds))

    def measured_steps(
        self, instance: int, steps: int, sequences: int, context_tokens: int, seconds: float
    ) -> None:
        """Add measured decode steps: sums over them of the batch, the context and the seconds.

        The cost is linear, so the sums are enough, however the batch has changed.
        """
        self._step.measured(instance, self.config.decode.step_s(sequences, context_tokens, steps), seconds)

    def measured_load(self, instance: int, tier: Tier, nbytes: int, seconds: float) -> None:
        """Add a measured load: "dram" by an instance, "ssd" by the store rank of this number."""
        self._load[tier].measured(instance, self.config.load.seconds(tier, nbytes), seconds)

    def measured_fetch(self, instance: int, near: int, far: int, seconds: float, rack: int = 0) -> None:
        """Add a measured fetch of bytes in DRAM. Its seconds are shared as predicted. See fetch_s.

        rack   bytes from other nodes of its rack, which `far` does not count
        """
        near_s = float(self.load_s(instance, "dram", near))
        alone_s = self.config.transfer.seconds(far) + self.config.transfer.rack_seconds(rack)
        far_s = float(self._transfer.of(instance) * alone_s)
        if near_s + far_s > 0:
            scale = seconds / (near_s + far_s)
            self.measured_load(instance, "dram", near, scale * near_s)
            self._transfer.measured(instance, alone_s, scale * far_s)
