"""Tensors as objects: a small typed header, then the values. torch is imported when one is met.

A mixin of `api`. The format is our own, not Mooncake's: only programs on this store read such tensors.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from store.mooncake_store.arguments import as_view, checked_name, checked_names
from store.mooncake_store.codes import BAD_PARAMETERS
from store.mooncake_store.config import ReplicateConfig

MAGIC = b"mlT1"
MAX_HEADER_BYTES = 4096
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Data type and shape of the values."""

    dtype: str
    shape: list[int]


_HEADER = msgspec.msgpack.Decoder(Header)


class Tensors:
    """put_tensor and get_tensor over the store's put and get."""

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor (from any device, contiguous or not); -600 when it is none, or holds nothing."""
        return self.pub_tensor(key, tensor)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Call put_tensor with a ReplicateConfig."""
        return self._store_tensor(key, tensor, config, upsert=False)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Call put_tensor, but replace an existing object."""
        return self._store_tensor(key, tensor, None, upsert=True)

    def batch_put_tensor(self, keys: list[str], tensors_list: list[Any]) -> list[int]:
        """Call put_tensor for each key."""
        names = checked_names(keys)
        if len(names) != len(tensors_list):
            return [BAD_PARAMETERS] * len(names)
        return [self.put_tensor(name, tensor) for name, tensor in zip(names, tensors_list)]

    def get_tensor(self, key: str) -> Any:
        """Return a tensor on the CPU, in memory of its own; None when there is none of this name."""
        data = self.get(checked_name(key))  # type: ignore[attr-defined]
        return _decoded(data)

    def batch_get_tensor(self, keys: list[str]) -> list[Any]:
        """Call get_tensor for each key."""
        return [self.get_tensor(name) for name in checked_names(keys)]

    def _store_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None, *, upsert: bool) -> int:
        import torch

        name = checked_name(key)
        if not isinstance(tensor, torch.Tensor):
            return BAD_PARAMETERS
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or not tensor.numel():
            return BAD_PARAMETERS
        header = msgspec.msgpack.encode(Header(dtype, list(tensor.shape)))
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        parts = [as_view(MAGIC + len(header).to_bytes(4, "little") + header), as_view(flat)]
        code: int = self._put(name, parts, config, upsert=upsert)  # type: ignore[attr-defined]
        return code


def _decoded(data: bytes) -> Any:
    """Return the tensor in these bytes; None when they hold none."""
    import torch

    header_bytes = int.from_bytes(data[4:8], "little")
    if data[:4] != MAGIC or not 0 < header_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        return None
    try:
        header = _HEADER.decode(data[8 : 8 + header_bytes])
    except msgspec.MsgspecError:
        return None
    if header.dtype not in DTYPES or any(size < 0 for size in header.shape):
        return None
    values = torch.frombuffer(bytearray(memoryview(data)[8 + header_bytes :]), dtype=torch.uint8)
    try:
        return values.view(getattr(torch, header.dtype)).reshape(header.shape)
    except RuntimeError:  # the shape does not fit the bytes
        return None
