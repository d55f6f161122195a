"""What the conductor predicted for each request, read from a recording of `serve --record`.

Used by `predictions`. A replay of the events gives the effects, and with them the terms of decisions.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_lite.control import Control
from mooncake_lite.control.effects import Decided
from mooncake_lite.control.events import RequestArrived
from mooncake_lite.recording import Recording


def predicted_ttft_s(file: Path) -> dict[str, float]:
    """Return the predicted seconds from arrival to first token, by request id. Raises RecordingError.

    The first placement of a request counts. The time that it was held before is part of its prediction.
    """
    recording = Recording(file)
    control = Control(recording.header.config)
    arrived_s: dict[str, float] = {}
    found: dict[str, float] = {}
    try:
        for entry in recording.entries():
            if isinstance(entry.event, RequestArrived):
                arrived_s[entry.event.request_id] = entry.now
            for effect in control.on(entry.event, entry.now):
                if isinstance(effect, Decided):
                    held_s = entry.now - arrived_s[effect.request_id]
                    found.setdefault(effect.request_id, held_s + effect.terms.ttft_s)
    finally:
        recording.close()
    return found
