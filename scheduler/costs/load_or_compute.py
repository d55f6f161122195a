"""Load or compute: whether the blocks that the pool offers to a prompt are worth loading.

Asked by `mooncake_lite.control` when a prompt begins. Reuse saves computing and costs a transfer. On a slow
link, with a small model, computing can be faster. The Mooncake paper derives the condition from bandwidth
and FLOP rate (FAST'25, section 2.2); FlexGen (Sheng et al., ICML 2023) places data by measured costs.
Explained in docs/explain/paged-memory.md.
"""

from __future__ import annotations

from collections import Counter

from scheduler.costs import Costs

PROBE_EVERY = 16
"""After so many decisions to compute, an instance loads once, because loading may have become faster.

Any value of this order works: one prompt in 17 pays for the measurement, and a change is noticed soon.
"""


class LoadOrCompute:
    """Compares both by the rates by which instances are chosen, too.

    _computed   decisions of an instance to compute since it last loaded
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._computed: Counter[int] = Counter()

    def loads(self, instance: int, num_tokens: int, cached: int, near: int, far: int, rack: int = 0) -> bool:
        """Tell whether to load the KV of the first `cached` tokens of a prompt. Without measurements: yes.

        near, far, rack   bytes of it on the node of the instance, in other racks, and on others of its rack
        """
        costs = self._costs
        if not costs.is_fetch_measured or not costs.is_measured or self._computed[instance] >= PROBE_EVERY:
            pays = True
        else:
            saved_s = costs.prefill_s(instance, num_tokens, 0) - costs.prefill_s(instance, num_tokens, cached)
            load_s = costs.fetch_s(instance, near, far) + costs.rack_transfer_s(instance, rack)
            pays = bool(load_s <= saved_s)
        self._computed[instance] = 0 if pays else self._computed[instance] + 1
        return pays
