"""Words that kernels are made of: Numba intrinsics out of functions from LLVM values to an LLVM value.

Used by the modules that define words, each with Numba's decorator for its target. It imports no Numba itself:
kernels_numba.runtime sets up the cache folder first. Explained in docs/explain/paged-attention.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

Decorator: TypeAlias = Callable[[Callable[..., Any]], Any]


def word_maker(intrinsic: Callable[..., Any]) -> Callable[..., Decorator]:
    """Return the decorator `word`. intrinsic: Numba's, for the CPU or for CUDA."""

    def word(kinds: Any, name: str = "") -> Decorator:
        """Make a word of a function of LLVM's builder and the values of a call. It returns the word's value,
        or None, as a word does that returns nothing.

        kinds   the signature, to whose types Numba converts; where it depends on the types of a call, a
                function of these
        """

        def decorate(emit: Callable[..., Any]) -> Any:
            @functools.wraps(
                emit
            )  # with its signature: Numba takes the first argument for the typing context
            def typed(typing_context: Any, *given: Any) -> tuple[Any, Callable[..., Any]]:
                return kinds(*given) if callable(kinds) else kinds, generate

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            typed.__name__ = name or emit.__name__
            return intrinsic(typed)

        return decorate

    return word
