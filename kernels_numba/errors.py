"""What a kernel refuses: every message names the argument, its value and what was expected.

    KernelError(Exception)
      ArgumentError(ValueError)   .argument, .value, .expected
        ShapeError                an axis is missing or has the wrong length
        DtypeError                an element type that the kernels do not know, or two that must agree
        LayoutError               strides: the array must be contiguous where the message says
        KindError                 not an array that we know, or arrays on different devices
        RangeError                a page id, a slot, a length or a range outside what is there
      BackendError                there is no CUDA to run the CUDA form on

Raised before anything is read or written. Explained in docs/explain/paged-attention.md.
"""

from __future__ import annotations

from typing import Any


class KernelError(Exception):
    """Base of everything that kernels_numba raises on purpose."""


class ArgumentError(KernelError, ValueError):
    """One argument is wrong."""

    def __init__(self, argument: str, value: Any, expected: str):
        super().__init__(f"{argument}={value}: expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected


class ShapeError(ArgumentError):
    """An axis is missing or has the wrong length."""


class DtypeError(ArgumentError):
    """An element type that the kernels do not know, or that differs from its partner's."""


class LayoutError(ArgumentError):
    """The array's strides do not fit."""


class KindError(ArgumentError):
    """Not an array of a known kind, or not on the device of the others."""


class RangeError(ArgumentError):
    """A page, a slot, a length or a range outside what is there."""


class BackendError(KernelError):
    """The CUDA form cannot run here."""
