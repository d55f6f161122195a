"""Arguments of callers, checked: ReplicateConfig, SoftPinAction, and the values of setup().

Used by the API. Types are checked when they are set, as in Mooncake: a wrong one is a TypeError, values
that do not fit together are an error code of the put. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from store.mooncake_store.codes import BAD_PARAMETERS, CodeError
from store.mooncake_store.messages import MAX_SHORT

SIZE = re.compile(r"(\d+) ?([KMGT]?B?)", re.IGNORECASE)
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
U64 = 2**64

SOFT_PIN_MS = 30 * 60 * 1000
"""Length of a soft pin without a time of its own: Mooncake Store's."""


class SoftPinAction(IntEnum):
    """The effect of a put on the soft pin of its object.

    PRESERVE   an upsert keeps the one there is; a new object has none
    ENABLE     evicted last, for soft_pin_ttl_ms
    DISABLE    none
    """

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < U64


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


_FIELDS: dict[str, tuple[Any, Any, str]] = {
    "replica_num": (1, _is_count, "an integer from 0"),
    "with_hard_pin": (False, lambda value: isinstance(value, bool | int), "a bool"),
    "soft_pin_action": (
        SoftPinAction.PRESERVE,
        lambda value: isinstance(value, SoftPinAction),
        "a SoftPinAction",
    ),
    "soft_pin_ttl_ms": (None, lambda value: value is None or _is_count(value), "None or an integer from 0"),
    "preferred_segment": ("", lambda value: isinstance(value, str), "a str"),
    "preferred_segments": ((), _is_strings, "a list of str"),
    "prefer_alloc_in_same_node": (False, lambda value: isinstance(value, bool | int), "a bool"),
    "group_ids": (None, lambda value: value is None or _is_strings(value), "None or a list of str"),
}
"""name -> (default, check, description of a valid value)."""


class ReplicateConfig:
    """Wishes about an object's replicas and pins. Attributes, with their defaults:

        replica_num=1              copies wanted, each on another segment; fewer when there are fewer
        with_hard_pin=False        never evicted
        soft_pin_action=PRESERVE   see SoftPinAction
        soft_pin_ttl_ms=None       with ENABLE only; None: 30 minutes
        preferred_segment=""       names of segments to try first
        preferred_segments=[]
        prefer_alloc_in_same_node=False    segments of the writer's machine first
        group_ids=None             accepted, one per key

    Setting a value of a wrong type or an unknown name raises TypeError or AttributeError.
    """

    __slots__ = tuple(_FIELDS)

    replica_num: int
    with_hard_pin: bool
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    preferred_segment: str
    preferred_segments: list[str]
    prefer_alloc_in_same_node: bool
    group_ids: list[str] | None

    def __init__(self) -> None:
        for name, (default, _, _) in _FIELDS.items():
            setattr(self, name, list(default) if isinstance(default, tuple) else default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise AttributeError(f"ReplicateConfig has no {name!r}; it has {', '.join(_FIELDS)}")
        default, fits, wanted = _FIELDS[name]
        if not fits(value):
            raise TypeError(f"ReplicateConfig.{name} must be {wanted}, not {value!r}")
        if isinstance(default, bool):
            value = bool(value)
        object.__setattr__(self, name, list(value) if isinstance(value, tuple) else value)

    def __repr__(self) -> str:
        return f"ReplicateConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"

    def is_valid(self) -> bool:
        """Tell whether the values fit together: at least one replica, a TTL only where a pin is set."""
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            return False
        return self.replica_num >= 1


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of setup() that matter here, checked. Sizes in bytes.

    protocol   any name is accepted: the path is chosen by what is possible
    """

    local_hostname: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    master_server_addr: str

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Setup:
        """Make it from setup()'s arguments by name; unknown names are ignored, as in Mooncake.

        Raises CodeError (BAD_PARAMETERS) for a missing or invalid value.
        """
        host, master = values.get("local_hostname"), values.get("master_server_addr")
        protocol = values.get("protocol", "tcp")
        for name, value in (("local_hostname", host), ("master_server_addr", master), ("protocol", protocol)):
            if not isinstance(value, str) or not 0 < len(value) <= MAX_SHORT - len(":65535"):
                raise CodeError(BAD_PARAMETERS, f"setup: {name}={value!r} must be a name")
        default = 16 * 2**20
        segment = parse_size("global_segment_size", values.get("global_segment_size", default))
        buffer = parse_size("local_buffer_size", values.get("local_buffer_size", default))
        return cls(str(host), segment, buffer, str(protocol), str(master))


def parse_size(name: str, value: Any) -> int:
    """Return bytes from an integer, or from a string such as "16MB" or "16 MB" (powers of 1024).

    Raises CodeError (BAD_PARAMETERS).
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**44:
        return value
    match = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise CodeError(BAD_PARAMETERS, f'setup: {name}={value!r} is no size; write 16777216 or "16MB"')
    nbytes = int(match[1]) * UNITS[match[2].upper().removesuffix("B")]
    if nbytes >= 2**44:
        raise CodeError(BAD_PARAMETERS, f"setup: {name}={value!r} is more than 16 TiB")
    return nbytes
