"""The one door to CUDA: everything from numba.cuda comes through here, so that its successor can replace it.

Imported by the *_cuda modules, and only when a device array turns up or a test asks. Works in three worlds:
a GPU, no GPU but NVVM (kernels lower to PTX), and the simulator (NUMBA_ENABLE_CUDASIM=1, set before numba is
imported). What the simulator lacks has a twin of the same name here.

No module here may be called cuda*: numba-cuda's import hook takes every name that contains "numba.cuda" for
its own, "kernels_numba.cuda_x" included, and then recurses without end.
"""

# Device functions are typed by Numba.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import BackendError

try:
    from numba import config
    from numba import cuda as _cuda
except ImportError as error:  # pragma: no cover - numba without its CUDA target
    raise BackendError(f"no CUDA target in numba ({error}): pip install 'mooncake-lite[gpu]'") from None

cuda: Any = _cuda
SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
QUIET_NAN = 0x7FC0
"""Bits of a bfloat16 NaN: rounding a NaN's own bits up could carry into an infinity."""

if SIMULATED:

    def widen(element):
        """float32 of an element of a cache: itself, or bfloat16 bits, the upper half of a float32."""
        if element.dtype == np.uint16:
            return (np.uint32(element) << np.uint32(16)).view(np.float32)
        return element

    def narrow(value, array):
        """A float32 as an element of `array`: itself, or rounded to the nearest even bfloat16, NaN kept."""
        if array.dtype != np.uint16:
            return np.float32(value)
        if value != value:
            return np.uint16(QUIET_NAN)
        bits = int(np.float32(value).view(np.uint32))
        return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    # Intrinsics, not device functions: those would ask the driver which GPU to compile for, and with
    # intrinsics kernels lower to PTX on machines that have none.

    @intrinsic
    def widen(typing_context, element):
        """float32 of an element of a cache: itself, or bfloat16 bits, the upper half of a float32."""

        def generate(context, builder, signature, arguments):
            if element != types.uint16:
                return arguments[0]
            word = builder.zext(arguments[0], ir.IntType(32))
            return builder.bitcast(builder.shl(word, word.type(16)), ir.FloatType())

        return types.float32(element), generate

    @intrinsic
    def narrow(typing_context, value, array):
        """A float32 as an element of `array`: itself, or rounded to the nearest even bfloat16, NaN kept."""

        def generate(context, builder, signature, arguments):
            number = arguments[0]
            if array.dtype != types.uint16:
                return number
            bits = builder.bitcast(number, ir.IntType(32))
            half = bits.type(16)
            odd = builder.and_(builder.lshr(bits, half), bits.type(1))
            rounded = builder.lshr(builder.add(builder.add(bits, bits.type(0x7FFF)), odd), half)
            is_nan = builder.fcmp_unordered("uno", number, number)
            return builder.trunc(builder.select(is_nan, bits.type(QUIET_NAN), rounded), ir.IntType(16))

        return array.dtype(types.float32, array), generate


def on_device(*tensors: Any) -> tuple[list[Any], Any]:
    """The arrays as kernels take them, without copies (bfloat16 as uint16), and the stream to launch on.

    A torch tensor: torch's current stream of its device. A Numba array: the default stream.
    Raises BackendError when there is no CUDA device.
    """
    if not SIMULATED and not cuda.is_available():
        raise BackendError("device arrays were given, but Numba finds no CUDA device (mooncake-lite doctor)")
    views, stream = [], 0
    for tensor in tensors:
        if getattr(tensor, "__cuda_ndarray__", False):
            views.append(tensor)
            continue
        import torch

        cuda.select_device(tensor.device.index)
        plain = tensor.detach()
        if arrays.dtype_name(tensor) == "bfloat16":
            plain = plain.view(torch.uint16)
        views.append(cuda.as_cuda_array(plain, sync=False))
        stream = cuda.external_stream(torch.cuda.current_stream(tensor.device).cuda_stream)
    return views, stream


__all__ = ["SIMULATED", "cuda", "narrow", "on_device", "widen"]
