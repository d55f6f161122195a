"""The one door to CUDA: everything from numba.cuda comes through here, so that its successor can replace it.

Imported by the *_cuda modules, and only when a device array turns up or a test asks. Works in three worlds:
a GPU, no GPU but NVVM (kernels lower to PTX), and the simulator (NUMBA_ENABLE_CUDASIM=1, set before numba is
imported). What Numba lacks is in backend_ptx, and for the simulator under the same names in backend_twins.

Plain rungs take arrays (on_device); tuned ones take addresses: launching with seven arrays costs some 20 us
on the host, with seven numbers 4 us, and 16-byte loads want bytes and not elements.

No module here may be called cuda*: numba-cuda's import hook takes every name that contains "numba.cuda" for
its own, "kernels_numba.cuda_x" included, and then recurses without end.
"""

# Device functions are typed by Numba.
# mypy: disable-error-code="no-untyped-def"
# All of backend_ptx or backend_twins is offered on.
# ruff: noqa: ANN201, ANN202, F403, F405

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kernels_numba.errors import BackendError

try:
    from numba import config
    from numba import cuda as _cuda
except ImportError as error:  # pragma: no cover - numba without its CUDA target
    raise BackendError(f"no CUDA target in numba ({error}): pip install 'mooncake-lite[gpu]'") from None

Bounds: TypeAlias = tuple[int, int] | None
Capability: TypeAlias = tuple[int, int] | tuple[int, int, str]
"""Compute capability: (8, 0) is sm_80, (9, 0, "a") is sm_90a."""
cuda: Any = _cuda
SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
"""A small batch is no mistake. Numba reads its variables anew when one has changed, and forgets a setting."""
config.reload_config()  # type: ignore[attr-defined]
CHUNK_ALIGNMENT = None if SIMULATED else 16
"""Of shared arrays that chunks of 16 bytes are copied to; the simulator knows no alignment."""
MAX_SHARED_BYTES = 48 * 1024
"""Of a block. More has to be asked for of the driver, with MAX_DYNAMIC_SHARED_SIZE_BYTES of a kernel, which
Numba does not do; no kernel here needs more."""
QUIET_NAN = 0x7FC0
"""Bits of a bfloat16 NaN: rounding a NaN's own bits up could carry into an infinity."""

if SIMULATED:
    from kernels_numba.gpu.backend_twins import *

    def widen(element):
        """float32 of an element of a cache: itself, bfloat16 bits (uint16) or float16 bits (int16)."""
        if element.dtype == np.uint16:
            return (np.uint32(element) << np.uint32(16)).view(np.float32)
        return np.float32(element.view(np.float16)) if element.dtype == np.int16 else element

    def narrow(value, array):
        """A float32 as an element of `array`: itself, or rounded to the nearest even 16 bits, NaN kept."""
        if array.dtype == np.int16:
            return np.float16(value).view(np.int16)
        return np.uint16(bfloat16_bits(value)) if array.dtype == np.uint16 else np.float32(value)

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    from kernels_numba.gpu.backend_ptx import *  # type: ignore[assignment]

    # Intrinsics, not device functions: those would ask the driver which GPU to compile for, and with
    # intrinsics kernels lower to PTX on machines that have none.

    @intrinsic
    def widen(typing_context, element):
        """float32 of an element of a cache: itself, bfloat16 bits (uint16) or float16 bits (int16)."""

        def generate(context, builder, signature, arguments):
            if element == types.int16:
                return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
            if element != types.uint16:
                return arguments[0]
            word = builder.zext(arguments[0], ir.IntType(32))
            return builder.bitcast(builder.shl(word, word.type(16)), ir.FloatType())

        return types.float32(element), generate

    @intrinsic
    def narrow(typing_context, value, array):
        """A float32 as an element of `array`: itself, or rounded to the nearest even 16 bits, NaN kept."""

        def generate(context, builder, signature, arguments):
            number = arguments[0]
            if array.dtype == types.int16:
                return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
            if array.dtype != types.uint16:
                return number
            bits = builder.bitcast(number, ir.IntType(32))
            half = bits.type(16)
            odd = builder.and_(builder.lshr(bits, half), bits.type(1))
            rounded = builder.lshr(builder.add(builder.add(bits, bits.type(0x7FFF)), odd), half)
            is_nan = builder.fcmp_unordered("uno", number, number)
            return builder.trunc(builder.select(is_nan, bits.type(QUIET_NAN), rounded), ir.IntType(16))

        return array.dtype(types.float32, array), generate


UNPACK = {"float32": float32_single, "bfloat16": bfloat16_pair, "float16": float16_pair}
"""Element type -> the float32 of a word of its elements."""


def check_shared(nbytes: int) -> None:
    """Raise BackendError when a block is planned with more shared memory than Numba can ask for."""
    if nbytes > MAX_SHARED_BYTES:
        raise BackendError(
            f"a block needs {nbytes} bytes of shared memory: Numba asks for at most {MAX_SHARED_BYTES}; use "
            "smaller tiles"
        )


@functools.cache
def compiled(kernel: Any, *, shared: bool = False, bounds: Bounds = None) -> Any:
    """The kernel as it is launched, one object each time; compiled on its first launch for each element type.

    shared: the memory that L1 and shared memory divide between them is wanted for shared memory. bounds:
    threads of a block, and how many blocks must find room on a multiprocessor: a limit for the registers.
    Numba links LTO-IR where there is nvJitLink: assembled from PTX as a relocatable object, each exchange of
    a warp inside a loop brings a call for the case that its lanes have parted, which costs up to 139
    registers a thread on sm_80, and there spills.
    """
    wishes = {"shared_memory_carveout": 100 if shared else None, "launch_bounds": bounds}
    known = () if SIMULATED else inspect.signature(cuda.jit).parameters
    return cuda.jit(kernel, **{name: wish for name, wish in wishes.items() if name in known})


def launched(cc: tuple[int, int]) -> Capability:
    """What Numba links for when it launches on a device of this capability: sm_90a on an sm_90.

    >>> launched((8, 0)), launched((9, 0))
    ((8, 0), (9, 0, 'a'))
    """
    return (*cc, "a") if cc >= (9, 0) else cc


def lower(kernel: Any, arguments: tuple, ccs: Sequence[Capability], bounds: Bounds = None) -> list[bytes]:
    """LTO-IR of a kernel for several compute capabilities, the bytes that Numba hands to nvJitLink when it
    launches a kernel of `compiled`. Numba's front end takes nine tenths of the time, and what it makes does
    not depend on the capability: where it can be asked for by itself, it runs once."""
    signature = types.void(*arguments)
    try:
        from numba.cuda.compiler import _compile_pyfunc_with_fixup  # type: ignore[attr-defined]
    except ImportError:
        wishes: Any = {"device": False, "abi": "numba", "output": "ltoir", "launch_bounds": bounds}
        return [cuda.compile(kernel, signature, cc=cc, **wishes)[0] for cc in ccs]
    library, _ = _compile_pyfunc_with_fixup(
        kernel, signature, device=False, cc=ccs[0][:2], abi="numba", launch_bounds=bounds
    )
    return [library.get_ltoir(cc=cc) for cc in ccs]


@functools.cache
def _check_available() -> None:
    """Raises BackendError when Numba finds no device. Asked once a process."""
    if not cuda.is_available():
        why = " ".join((cuda.cuda_error() or "no NVVM: pip install 'mooncake-lite[gpu]'").split())
        raise BackendError(f"device arrays were given, but Numba finds no CUDA device ({why})")


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    """Numba's object of a stream made elsewhere. One for each: Numba keeps launch configurations by it."""
    return cuda.external_stream(handle)


def _stream_of(tensor: Any) -> Any:
    """Torch's current stream of the tensor's device; the default stream, 0, for a Numba array."""
    if SIMULATED:
        return 0
    _check_available()
    if getattr(tensor, "__cuda_ndarray__", False):
        return 0
    import torch

    handle = torch.cuda.current_stream(tensor.device).cuda_stream
    return _stream(handle) if handle else 0


def on_its_device(launch: Callable[..., None]) -> Callable[..., None]:
    """Make the device of the first argument current while `launch` runs; the caller's is current again after.

    Torch makes the device current, not Numba: its select_device puts the context on the thread's stack once
    more with every call.
    """

    @functools.wraps(launch)
    def launch_there(tensor: Any, *others: Any, **options: Any) -> None:
        if not hasattr(tensor, "__cuda_ndarray__"):
            import torch

            if torch.cuda.current_device() != tensor.device.index:
                with torch.cuda.device(tensor.device):
                    launch(tensor, *others, **options)
                return
        launch(tensor, *others, **options)

    return launch_there


def on_device(*tensors: Any) -> tuple[list[Any], Any]:
    """The arrays as kernels take them, without copies (16-bit floats as bits), and the stream to launch on.

    A torch tensor: torch's current stream of its device. A Numba array: the default stream.
    Raises BackendError when there is no CUDA device.
    """
    stream = _stream_of(tensors[0])
    views = []
    for tensor in tensors:
        bits = {"bfloat16": "uint16", "float16": "int16"}.get(str(tensor.dtype).rpartition(".")[2])
        if getattr(tensor, "__cuda_ndarray__", False):
            views.append(tensor if bits is None else tensor.view(np.dtype(bits)))
            continue
        import torch

        plain = tensor.detach()
        if bits is not None:
            plain = plain.view(getattr(torch, bits))
        views.append(cuda.as_cuda_array(plain, sync=False))
    return views, stream


def addresses(*tensors: Any) -> tuple[list[Any], Any]:
    """Where the arrays' first bytes lie, as kernels of addresses take them, and the stream to launch on.

    A launch with addresses costs a fraction of one with arrays: nothing is wrapped and nothing inspected.
    Raises BackendError when there is no CUDA device.
    """
    stream = _stream_of(tensors[0])
    if SIMULATED:
        return [Memory(tensor._ary) for tensor in tensors], stream
    return [np.int64(address_of(tensor)) for tensor in tensors], stream


def address_of(tensor: Any) -> int:
    """The address of a torch tensor's or a Numba array's first byte."""
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr()
    if SIMULATED:
        return tensor.ctypes.data
    return tensor.__cuda_array_interface__["data"][0]


def as_bytes(array: Any) -> Any:
    """The same memory as uint8: a last axis of `itemsize` times the length. The array must be contiguous."""
    if getattr(array, "__cuda_ndarray__", False):
        return array.view(np.uint8)
    import torch

    return array.detach().view(torch.uint8)


def aligned(*tensors: Any) -> bool:
    """Whether every array begins at a multiple of 16 bytes, as 16-byte loads want."""
    return all(address_of(tensor) % 16 == 0 for tensor in tensors)


def workspace(like: Any, floats: int) -> Any:
    """`floats` float32 beside `like`, uninitialised. From torch, whose allocator knows streams and graphs, or
    a Numba array that is kept (so Numba arrays are for one stream at a time, the default one)."""
    if not getattr(like, "__cuda_ndarray__", False):
        import torch

        return torch.empty(floats, dtype=torch.float32, device=like.device)
    if SIMULATED:  # poisoned: what is read must have been written
        return cuda.to_device(np.full(floats, np.nan, np.float32))
    return _kept(cuda.get_current_device().id, 1 << max(16, (floats - 1).bit_length()))


@functools.cache
def _kept(device: int, floats: int) -> Any:
    return cuda.device_array(floats, np.float32)


@functools.cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def multiprocessors(like: Any) -> int:
    """Streaming multiprocessors of the device that holds `like`; 2 in the simulator."""
    if SIMULATED:
        return 2
    if getattr(like, "__cuda_ndarray__", False):
        return cuda.get_current_device().MULTIPROCESSOR_COUNT
    return _multiprocessors(like.device.index)
