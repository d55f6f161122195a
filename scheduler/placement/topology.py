"""Topology-aware: what a request moves stays in a rack where that pays.

A prefix is looked for on the own node, in its rack, then anywhere:

    own node    queue + prefill
    own rack    queue + transfer within the rack + prefill
    anywhere    queue + transfer within the rack, then from other racks and SSD + prefill

Each instance takes the fastest of the three. Of the decode instances, the one follows whose handover and
answer end first: the KV of the whole prompt moves there. What it loses by its rack counts for the prefill
instance, too. Racks are configured (--racks). In a single rack with one bandwidth this is `global-cache`, as
long as no block is on SSD only.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import ANY, Ranked
from scheduler.placement.view import NOTHING, View

TIE_S = 1e-9
"""As that of choose.py."""


class Topology:
    """Minimises queue + fetch + prefill over the three sources of a prefix, and what the handover adds."""

    name = "topology"

    def __init__(self, far_tokens: int = -1) -> None:
        """
        far_tokens   a prompt is prefilled in racks that decode nothing if it has as many tokens to compute,
                     and else in racks that decode; below 0: wherever that ends first
        """
        self.far_tokens = far_tokens

    def rank(self, view: View) -> Ranked:
        """Score: predicted seconds to the first token, and those that the way to the decode instance adds."""
        near, in_rack = view.near, view.in_rack
        anywhere = np.maximum(in_rack, view.best)
        rack_s = view.rack_fetch_s
        fetch_s = np.stack([np.zeros(len(near)), rack_s, rack_s + view.fetch_beyond_s(in_rack)])
        reused = np.stack([near, in_rack, anywhere])
        prefill_s = view.prefill_s(reused)
        fastest = (fetch_s + prefill_s).argmin(axis=0), np.arange(len(near))
        decode, lost_s = _decodes(view)
        lost_s = lost_s + self._wrong_side(view, view.request.num_tokens - view.tokens(reused[fastest]))
        return Ranked(
            view.queue_s + fetch_s[fastest] + prefill_s[fastest] + lost_s,
            reused[fastest],
            fetch_s[fastest],
            prefill_s[fastest],
            (reused[fastest] > near) | (near == view.best),  # see kvcache_centric.py
            decode,
        )

    def _wrong_side(self, view: View, to_compute: np.ndarray) -> np.ndarray:
        """Return (n,) 0 for the instances that may have the prompt by its length, inf for the others.

        to_compute   (n,) tokens that each instance would compute
        """
        if self.far_tokens < 0:
            return NOTHING
        is_far = ~np.isin(view.state.prefill_columns.rack, view.state.decode_columns.rack)
        if is_far.all() or not is_far.any():
            return NOTHING
        is_long = to_compute[~is_far].min() >= self.far_tokens
        return np.where(is_far == is_long, 0.0, np.inf)


def _decodes(view: View) -> tuple[np.ndarray, np.ndarray]:
    """Choose for the prompts of each rack the decode instance that ends handover and answer first.

    Returns two columns over the prefill instances: its row, and by how many seconds it ends later than from
    the best rack. Instances that decode what they prefill lose none. Without racks the fastest one follows.
    """
    state, request = view.state, view.request
    if not state.racks.of_node:
        return ANY, NOTHING
    prefills, decodes = state.prefill_columns, state.decode_columns
    tbt_s = state.costs.tbt_s(decodes.instance, decodes.batch, decodes.context, request.context, request.n)
    answer_s = max(request.predicted_tokens, 1.0) * (tbt_s + TIE_S * decodes.batch)
    answer_s = np.where(decodes.free >= request.n, answer_s, np.inf)
    row, lost_s = np.zeros(len(prefills.rack), np.int64), np.zeros(len(prefills.rack))
    for rack in np.unique(prefills.rack).tolist():
        end_s = answer_s + view.handover_s(rack)
        best = end_s.argmin()
        row[prefills.rack == rack] = best
        lost_s[prefills.rack == rack] = end_s[best]
    if not np.isfinite(lost_s).all():
        return ANY, NOTHING  # only instances with both duties have free slots
    return row, np.where(prefills.decode_row < 0, lost_s - lost_s.min(), 0.0)
