"""Arguments of the API, checked: a wrong type is a TypeError, as with Mooncake's compiled methods.

Used by `api` and `tensors`. Values that have the right type but make no sense are codes, not errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from store.mooncake_store.config import SOFT_PIN_MS, ReplicateConfig, SoftPinAction
from store.mooncake_store.messages import MAX_NAME_BYTES, MAX_SHORT, Wish


def checked_name(text: Any, argument: str = "key") -> str:
    """Return an object's name, or another text. Raises TypeError when it is no str, or has no UTF-8."""
    if not isinstance(text, str):
        raise TypeError(f"{argument} must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{argument} {text!r} has no UTF-8") from None
    return text


def checked_names(texts: Any, argument: str = "keys") -> list[str]:
    """Check each value of a list. Raises TypeError."""
    return [checked_name(text, f"an item of {argument}") for text in _checked_list(argument, texts, "str")]


def is_usable(name: str) -> bool:
    """Tell whether an object can have this name: not empty, and not longer than a message takes."""
    return 0 < len(name) <= MAX_NAME_BYTES // 4 or 0 < len(name.encode()) <= MAX_NAME_BYTES


def checked_number(name: str, value: Any) -> int:
    """Return an address, a size or an offset. Raises TypeError unless it is an integer in 0 .. 2**64 - 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    number = value.__index__()
    if not 0 <= number < 2**64:
        raise TypeError(f"{name}={number} is outside 0 .. 2**64-1")
    return int(number)


def checked_numbers(name: str, values: Any) -> list[int]:
    """Check each value of a list. Raises TypeError."""
    return [checked_number(name, value) for value in _checked_list(name, values, "integers")]


def as_view(value: Any) -> memoryview:
    """Return the bytes of a buffer, flat; gaps are closed by copying.

    Raises TypeError for anything but a buffer, and for an array of Python objects, whose bytes are addresses.
    """
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        kind = type(value).__name__
        raise TypeError(f"value must be a buffer such as bytes, not {kind}: {error}") from None
    if view.format == "O" or getattr(getattr(value, "dtype", None), "hasobject", False):
        raise TypeError(f"value must have bytes of its own; this {type(value).__name__} holds Python objects")
    if not view.c_contiguous or not view.nbytes:
        return memoryview(view.tobytes())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def as_views(values: Any) -> list[memoryview]:
    """Return `as_view` of each buffer of a list. Raises TypeError."""
    return [as_view(value) for value in _checked_list("values", values, "buffers")]


def _checked_list(name: str, values: Any, kind: str) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of {kind}, not {type(values).__name__}")
    return values


def wish_of(config: ReplicateConfig | None) -> Wish | None:
    """Return the wish for the master; None when the values do not fit together. Raises TypeError."""
    if config is None:
        return DEFAULT_WISH
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    if not config.is_valid():
        return None
    pin_ms = None
    if config.soft_pin_action is SoftPinAction.ENABLE:
        pin_ms = SOFT_PIN_MS if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms
    preferred: Sequence[str] = [config.preferred_segment, *config.preferred_segments]
    return Wish(
        min(config.replica_num, 2**20),
        config.with_hard_pin,
        None if pin_ms is None else min(pin_ms, 10**12),
        config.soft_pin_action is SoftPinAction.PRESERVE,
        [name for name in dict.fromkeys(preferred) if 0 < len(name) <= MAX_SHORT],
    )


DEFAULT_WISH = wish_of(ReplicateConfig())


def memory_at(ptr: int, size: int) -> memoryview:
    """Return a view of the caller's memory. A wrong address ends the process. Raises TypeError."""
    if size >= 2**63:
        raise TypeError(f"size={size} is more than a process can have")
    return memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")


_SETUP_NAMES = (
    *("local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol"),
    *("rdma_devices", "master_server_addr", "engine", "enable_ssd_offload", "ssd_offload_path"),
    *("tenant_id", "enable_client_http_server", "client_http_port"),
)


def setup_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of setup by name. Raises TypeError as a compiled method would."""
    if len(args) + len(kwargs) == 1:
        config = args[0] if args else kwargs.get("config")
        if isinstance(config, dict):
            return config
    if len(args) > len(_SETUP_NAMES):
        raise TypeError(f"setup() takes at most {len(_SETUP_NAMES)} arguments, {len(args)} were given")
    values = dict(zip(_SETUP_NAMES, args))
    unknown = kwargs.keys() - set(_SETUP_NAMES) | kwargs.keys() & values.keys()
    values |= kwargs
    missing = [name for name in _SETUP_NAMES[:7] if name not in values]
    if unknown or missing:
        raise TypeError(f"setup(): unknown or doubled {sorted(unknown)}, missing {missing}")
    for name in ("global_segment_size", "local_buffer_size"):
        checked_number(name, values[name])
    for name in ("local_hostname", "metadata_server", "protocol", "rdma_devices", "master_server_addr"):
        checked_name(values[name], name)
    return values
