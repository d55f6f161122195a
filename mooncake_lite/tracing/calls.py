"""Notes calls of objects that know nothing of traces.

Used by the files named `traced.py`. See docs/how-to/trace.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mooncake_lite.tracing.tracer import Tracer

Note = Callable[..., None]


def note_calls(
    tracer: Tracer, target: object, method: str, *, before: Note | None = None, after: Note | None = None
) -> None:
    """From now on, note each call of a method of this object.

    before   called with the arguments
    after    called with (time of the call in ns, its result or None if it raised, the arguments)
    """
    inner = getattr(target, method)

    @functools.wraps(inner)
    def noted(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        began_ns, result = tracer.now_ns(), None
        try:
            result = inner(*arguments, **named)
        finally:
            if after is not None:
                after(began_ns, result, *arguments, **named)
        return result

    setattr(target, method, noted)
