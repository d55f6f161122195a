"""The requests of a recording, as a trace: what would have happened under another policy?

Used by `simulate cluster --from-recording`. `conductor/recording.py` has the format. Explained in
docs/explain/simulator.md.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean

from mooncake_lite.conductor.recording import Recording
from mooncake_lite.control import ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.errors import TraceError
from mooncake_lite.workloads.traces import MOST_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording tells of its cluster and its requests. assumed: answers of unknown length."""

    config: ControlConfig
    trace: Trace
    assumed: int

    @property
    def roles(self) -> Counter[str]:
        """Return how many ranks had each role, without the steward."""
        return Counter(role for role in self.config.roles if role != "steward")


@dataclass(slots=True)
class _Seen:
    """One request. answer_tokens: of its longest answer; puts: keys of the blocks that one of them filled."""

    arrived: ev.RequestArrived
    at_s: float
    answer_tokens: int = 0
    puts: list[int] = field(default_factory=list)

    def put(self, key: int, parent: int | None, index: int) -> None:
        """Note a block, if it follows those that are noted: blocks of other answers do not."""
        known = [*self.arrived.keys, *self.puts]
        if index == len(known) and (not known or known[-1] == parent):
            self.puts.append(key)


def read_recording(path: Path) -> Recorded:
    """Return the requests of a recording. Raises RecordingError, and TraceError for one without a request.

    A request with several answers becomes one with the longest of them. One that was not answered gets the
    mean length of the others, at most its limit; if none was answered, its limit.
    """
    seen: dict[str, _Seen] = {}
    with closing(Recording(path)) as recording:
        config = recording.header.config
        for entry in recording.entries():
            _note(seen, entry.event, entry.now)
    if not seen:
        raise TraceError(f"{path}: there is no request in this recording")
    found = list(seen.values())
    assumed = sum(not one.answer_tokens for one in found)
    return Recorded(config, _trace_of(found, config.block_layout.block_tokens), assumed)


def _note(seen: dict[str, _Seen], event: ev.Event, now: float) -> None:
    match event:
        case ev.RequestArrived() if not event.answers:
            seen.setdefault(event.request_id, _Seen(event, now))
        case ev.PrefillEnded() if event.finished and (one := seen.get(client_id_of(event.request_id))):
            one.answer_tokens = max(one.answer_tokens, 1)
        case ev.DecodeEnded() if one := seen.get(client_id_of(event.request_id)):
            one.answer_tokens = max(one.answer_tokens, event.answer_tokens)
        case ev.PutsWanted():
            for request_id, key, before in zip(event.requests, event.keys, event.before, strict=True):
                if one := seen.get(client_id_of(request_id)):
                    one.put(key, *before)


def _trace_of(seen: list[_Seen], size: int) -> Trace:
    """Return these requests. size: tokens of a block."""
    known = [one.answer_tokens for one in seen if one.answer_tokens]
    usual = round(fmean(known)) if known else MOST_TOKENS
    ids, fresh = dict[int, int](), count()
    requests, answers = [], []
    for one in sorted(seen, key=lambda one: one.at_s):
        arrived, blocks = one.arrived, -(-one.arrived.num_tokens // size)
        named = [ids[key] if key in ids else ids.setdefault(key, next(fresh)) for key in arrived.keys]
        named += [next(fresh) for _ in range(blocks - len(named))]
        answer = one.answer_tokens or max(1, min(usual, arrived.max_tokens))
        at_ms = 1000 * (one.at_s - seen[0].at_s)
        requests.append(TraceRequest(at_ms, arrived.num_tokens, answer, named))
        answers.append([ids[key] if key in ids else ids.setdefault(key, next(fresh)) for key in one.puts])
    return Trace(requests, size, answers)
