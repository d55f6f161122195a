"""Which array lives where, and as what a kernel sees it; the checks that all public functions share.

Called at the head of every public function. Knows no kernel. Inside the package a uint16 array means
bfloat16 bits, an int16 array float16 bits: Numba computes with neither type on the CPU.
A view or an error, never a copy. Explained in docs/explain/paged-attention.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels_numba.errors import DtypeError, KindError, LayoutError, ShapeError

CPU, CUDA = "cpu", "cuda"
FLOATS = ("float32", "float16", "bfloat16")


def _torch_of(array: Any) -> Any:
    """The torch module when `array` is a tensor of it, else None; never imports torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def device_of(name: str, array: Any) -> str:
    """CPU or CUDA. Raises KindError for anything that is not a known array."""
    if isinstance(array, np.ndarray):
        return CPU
    if _torch_of(array) is not None:
        if array.device.type in (CPU, CUDA):
            return array.device.type
        raise KindError(name, f"tensor on {array.device}", "a torch tensor on cpu or cuda")
    if getattr(array, "__cuda_ndarray__", False):
        return CUDA
    raise KindError(name, type(array).__name__, "a NumPy array, a torch tensor or a Numba device array")


def _place_of(name: str, array: Any) -> str:
    """CPU, or CUDA with the device's number: "cuda:1". The simulator's arrays have none. Raises KindError."""
    device = device_of(name, array)
    if device == CPU:
        return CPU
    if _torch_of(array) is not None:
        return f"{CUDA}:{array.device.index}"
    memory = getattr(array, "gpu_data", None)
    return CUDA if memory is None else f"{CUDA}:{memory.context.device.id}"


def common_device(arrays: dict[str, Any]) -> str:
    """CPU or CUDA, where all arrays live. Raises KindError naming the first that lives elsewhere, on another
    CUDA device as well."""
    names = iter(arrays)
    first = next(names)
    place = _place_of(first, arrays[first])
    for name in names:
        other = _place_of(name, arrays[name])
        if other != place:
            raise KindError(name, other, f"an array on {place}, where {first} lives")
    return device_of(first, arrays[first])


def dtype_name(array: Any) -> str:
    """Name of the element type, "bfloat16" for uint16 as well."""
    name = str(array.dtype).rpartition(".")[2]
    return "bfloat16" if name == "uint16" else name


def check_float(name: str, array: Any, same_as: tuple[str, Any] | None = None) -> None:
    """float32, float16 or bfloat16, and the same as the partner's. Raises DtypeError."""
    own = dtype_name(array)
    if own not in FLOATS:
        raise DtypeError(f"{name}.dtype", own, "float32, float16 or bfloat16 (uint16 holds bfloat16 bits)")
    if same_as is not None and dtype_name(same_as[1]) != own:
        raise DtypeError(f"{name}.dtype", own, f"{dtype_name(same_as[1])}, as {same_as[0]} has")


def check_integer(name: str, array: Any, dtype: str) -> None:
    """Exactly the integer type asked for. Raises DtypeError."""
    if dtype_name(array) != dtype:
        raise DtypeError(f"{name}.dtype", dtype_name(array), dtype)


def check_shape(name: str, array: Any, *expected: int | str) -> None:
    """One entry per axis: a length, or the axis's name where any length will do. Raises ShapeError."""
    shape = tuple(array.shape)
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or want == have for want, have in zip(expected, shape)
    )
    if not fits:
        raise ShapeError(f"{name}.shape", shape, "(" + ", ".join(map(str, expected)) + ")")


def check_contiguous(name: str, array: Any) -> None:
    """C-contiguous. Raises LayoutError."""
    if isinstance(array, np.ndarray):
        contiguous = array.flags.c_contiguous
    elif _torch_of(array) is not None:
        contiguous = array.is_contiguous()
    else:
        contiguous = array.is_c_contiguous()
    if not contiguous:
        raise LayoutError(name, f"array of strides {strides_of(array)}", "a C-contiguous array")


def check_writable(name: str, array: Any) -> None:
    """Kernels write by address, so nobody else would notice. Raises LayoutError."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise LayoutError(name, "read-only array", "a writable array")


def strides_of(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if _torch_of(array) is not None:
        return tuple(array.stride())
    return tuple(step // array.dtype.itemsize for step in array.strides)


def as_numpy(array: Any) -> np.ndarray:
    """A CPU array as the kernels take it, without a copy; bfloat16 as uint16, float16 as int16."""
    torch = _torch_of(array)
    if torch is None:
        bits = {"bfloat16": np.uint16, "float16": np.int16}.get(array.dtype.name)
        return array if bits is None else array.view(bits)
    tensor = array.detach() if array.requires_grad else array
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def plain_float32(array: Any) -> bool:
    """Whether one look shows a contiguous float32 array on the CPU; the checks find out what else it is."""
    if isinstance(array, np.ndarray):
        return array.dtype == np.float32 and array.flags.c_contiguous
    torch = sys.modules.get("torch")
    return bool(torch and array.dtype is torch.float32 and array.is_cpu and array.is_contiguous())


def address_of(array: Any) -> int:
    """Where the first byte of a CPU array lies."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()  # type: ignore[no-any-return]


_PASSED: dict[Any, Any] = {}
_MOST_PASSED = 1024
"""Kinds of calls that are remembered. Beyond it all are forgotten, and each is checked once more."""


def check_once(check: Callable[[dict[str, Any]], Any], named: dict[str, Any]) -> Any:
    """check(named), or what it returned for arrays of just these kinds, dtypes, shapes, strides and flags.

    For calls that come once a layer and step: there the checks would take longer than the kernel. `check`
    may look at nothing else of the arrays; what raises is never remembered.
    """
    torch = sys.modules.get("torch")
    key: list[Any] = [check]
    for name, array in named.items():
        if torch is not None and isinstance(array, torch.Tensor):
            key += (name, array.dtype, array.device, array.shape, array.stride())
        elif isinstance(array, np.ndarray):
            key += (name, array.dtype, array.shape, array.strides, array.flags.writeable)
        elif array is not None:
            return check(named)
    found = tuple(key)
    passed = _PASSED.get(found)  # once: another thread may clear it at any time
    if passed is None:
        passed = check(named)
        if len(_PASSED) >= _MOST_PASSED:
            _PASSED.clear()
        _PASSED[found] = passed
    return passed


def empty_like(array: Any) -> Any:
    """An uninitialised array of the same kind, shape and dtype. Raises KindError."""
    device_of("query", array)
    torch = _torch_of(array)
    if torch is not None:
        return torch.empty_like(array)
    if isinstance(array, np.ndarray):
        return np.empty_like(array)
    from kernels_numba.gpu.backend_cuda import cuda

    return cuda.device_array(array.shape, array.dtype)
