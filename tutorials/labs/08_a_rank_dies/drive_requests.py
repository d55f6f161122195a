"""The child's side of 8c: a control plane whose ranks do what the tests say, and the region of 8c.

It runs beside a student's code, so it knows no expected value.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import RequestRecord
from scheduler.requests import Request
from scheduler.state import State
from store.layout import BlockLayout

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
SUMS = [21, 22]
STORE = 2
"""The store rank; rank 1 prefills, and all from 3 on decode."""

TOKENS = 2 * 64 + 10
"""Of a prompt: two blocks and a tail."""
SLOTS = 8


class Plane:
    """A control plane with one prefill rank, a store rank with a tier, and decode ranks.

    Its ranks and its gateway say what the tests want, on a clock that the tests move.
    """

    def __init__(self, decodes: int) -> None:
        ranks = ["prefill", "store", *["decode"] * decodes]
        config = ControlConfig(
            layout=(2, 1, 64, 8, 4, "none"),
            roles=["steward", *ranks],
            nodes=[0] * (len(ranks) + 1),
            saves=True,
        )
        self.control, self.now = Control(config), 0.0
        self.orders: dict[str, Any] = {}
        for rank, role in enumerate(ranks, 1):
            more = {"segment_bytes": 32 * LAYOUT.nbytes, "tier": True} if role == "store" else {}
            slots = {"prefill": 1, "store": 0}.get(role, SLOTS)
            self.on(ev.RankJoined(rank, 0, rank, (role,), 0, slots=slots, **more))
        self.on(ev.TierIndexed(STORE, 0, [7, 8], [7, 8], True))
        self.on(ev.GatewayReady("gateway-0"))

    def on(self, event: ev.Event) -> None:
        """Apply an event, and keep the last order about each request."""
        self.now += 0.001
        for effect in self.control.on(event, self.now):
            if isinstance(effect, fx.StartPrefill | fx.StartDecode):
                self.orders[effect.request_id] = effect

    def bring(self, name: str, stage: str, answers: int) -> None:
        """Bring a request to a stage, as its ranks would; a new one or one that waits for its prefill."""
        keys = [7, 8] if stage == "promoting" else [_key(name, 1), _key(name, 2)]
        if name not in self.control.requests:
            self.on(ev.RequestArrived(name, TOKENS, 64, keys, keys, n=answers))
        if stage in ("queued", "promoting", "prefilling"):
            return
        if stage == "cancelled":
            self.on(ev.RequestCancelled(name))
            return
        job = self.orders[name]
        sums = [SUMS] * len(job.store)
        self.on(
            ev.PrefillEnded(
                job.rank, 0, name, job.attempt, sums, finished=[], load_s=0.0, compute_s=0.1, store_s=0.0
            )
        )
        order = self.orders[name]
        if stage == "loading":
            return
        self.on(ev.DecodeLoaded(order.rank, 0, name, order.attempt))
        if stage == "ending":
            for branch in range(answers):
                self.on(ev.DecodeEnded(order.rank, 0, name, order.attempt, branch))

    def lose_rank(self, rank: int) -> None:
        """Note that a rank is lost, as the first step of its removal does."""
        self.control.members.lose(rank, "died")

    def lose(self, name: str, may_still_write: bool) -> dict[str, Any]:
        """Call the region, and tell what has become of the request, and at which time it joined the line."""
        requests, before = self.control.requests, self.now
        record = requests[name]
        self.control._out.clear()
        times: list[float] = []

        def noted(state: State, request: Request, now: float, **more: bool) -> None:
            times.append(now)
            joins(state, request, now, **more)

        joins = State.wait_in_line
        with patch.object(State, "wait_in_line", noted):
            requests.lose(record, "its work is lost", self.now, may_still_write)
        sent = [_told(effect) for effect in self.control._out]
        reasons = [str(effect.reason) for effect in self.control._out if hasattr(effect, "reason")]
        self.control._out.clear()
        return self.seen(name, record, sent) | {"now": before, "joined": times, "reasons": reasons}

    def seen(self, name: str, record: RequestRecord, sent: list[list[Any]]) -> dict[str, Any]:
        """What the books say about a request."""
        state, directory = self.control.state, self.control.directory
        stats = directory.stats()
        owner = directory._leases.owners.get(name)
        problem = ""
        try:
            self.control.check()
        except (AssertionError, KeyError) as error:
            problem = f"{type(error).__name__} {error}".strip()
        return {
            "stage": record.stage.value,
            "is_open": name in self.control.requests,
            "tries": record.tries,
            "pause_s": record.pause_s,
            "waits": name in state.held,
            "has_place": name in state._placed,
            "worker": record.present.worker,
            "attempt": record.attempt,
            "sent": sent,
            "leases": len(owner.leased) if owner else 0,
            "writing": stats["writing_bytes"] // LAYOUT.nbytes,
            "quarantined": stats["quarantined_bytes"] // LAYOUT.nbytes,
            "problem": problem,
        }


def _key(name: str, block: int) -> int:
    return int.from_bytes(name.encode()[:6], "little") * 1000 + block


def _told(effect: Any) -> list[Any]:
    """An effect as the tests read it: what, about which request, and its numbers."""
    kind = type(effect).__name__
    if isinstance(effect, fx.Recall):
        return [kind, effect.request_id, effect.attempt, effect.branches]
    if isinstance(effect, fx.Forget):
        return [kind, effect.request_id, effect.outcome]
    return [kind, getattr(effect, "request_id", "")]


def lose(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play the steps. Tells what has become of a request after each loss.

    ["bring", name, stage, answers]   a request comes so far; "waits" for a request that goes on is "queued"
    ["dies", name, which]             a rank that the request needs is lost: "prefill", "decode" or "store"
    ["lose", name, may_still_write]   its work is lost: the region
    ["recalled", name, tokens]        its gateway says what its client has
    ["wait", seconds]                 time passes
    """
    plane = Plane(inputs["decodes"])
    seen = []
    for verb, *words in inputs["steps"]:
        if verb == "bring":
            plane.bring(*words)
        elif verb == "dies":
            record = plane.control.requests[words[0]]
            plane.lose_rank(STORE if words[1] == "store" else getattr(record.present, words[1]))
        elif verb == "lose":
            seen.append(plane.lose(*words))
            if not seen[-1]["is_open"] or seen[-1]["problem"]:
                break
            for rank in sorted(plane.control.members.lost):
                if rank in plane.control.state.decodes and not plane.control.state.on_instance(rank):
                    plane.control.state.remove_instance(rank)
        elif verb == "recalled":
            record = plane.control.requests[words[0]]
            if record.stage.value == "recalling":
                answers = [ev.AnswerSoFar(branch, words[1], False) for branch in sorted(record.branches)]
                plane.on(ev.Recalled(words[0], record.attempt, answers))
        else:
            plane.now += words[0]
            plane.on(ev.Tick())
    return seen


CALLS = {"lose": lose}
