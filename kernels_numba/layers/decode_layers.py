"""The decoder layers of a decode step in one compiled call: the kernels of single calls, no Python between.

Called by the model's forward pass (mooncake_lite/model/decode_pass.py) where every sequence has one new token
and our linear kernels multiply every layer. Knows arrays, not models. A layer:

    x += delta -> norm -> q, k, v [+ biases] [-> norms of q and k] -> k and v to their pages, q turned -.
    .------------------------ delta <- output layer <- attention over the pages <----------------------'
    `-> x += delta -> norm -> gate, up -> SwiGLU -> down -> delta, which the next layer adds

Each line ends with a sum over heads or over the MLP. Ranks that share a layer each have a part of both, so
they call one half of a layer after the other and add up delta in between.

Every kernel is called at the address where it was compiled for its other callers: so the bits are those of
single calls, and compiling this file compiles no kernel again. What it saves: docs/explain/model.md.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.attention.attention_decode_tiles import decode_v3
from kernels_numba.checks import check_window
from kernels_numba.errors import ShapeError
from kernels_numba.intrinsics.linear_vectors import floats_at, keep
from kernels_numba.intrinsics.numerics import copy_bytes
from kernels_numba.intrinsics.vectors import LONG
from kernels_numba.layers.paged_pass import PagedPass
from kernels_numba.layers.row_kernels import PARALLEL_VALUES, norm_v1, silu_v1
from kernels_numba.matmul.linear_layers import Linears
from kernels_numba.matmul.linear_tiles import HALVES_ADDRESS, linear_v2, linear_v2_parallel
from kernels_numba.movers.block_kernels import move_tokens
from kernels_numba.movers.rotary import scatter_rotated
from kernels_numba.runtime import PARALLEL_CALL, PART, get_num_threads, njit, register_jitable

from numba import types  # isort: skip
from numba.core import cgutils, sigutils  # isort: skip
from numba.core.errors import TypingError  # isort: skip
from numba.extending import intrinsic  # isort: skip

_NORM, _SILU, _LINEAR, _LINEAR_PARALLEL, _TURN, _MOVE, _ATTEND, _HALVES = range(8)
"""Entries of `known`: addresses of the kernels, and of the table of halves that the linear ones read."""
_QKV, _OUTPUT, _GATE_UP, _DOWN = map(np.int64, range(4))  # for an int, Numba would compile each by itself
_GROUPS = ((0, 3), (3, 4), (4, 6), (6, 7))
"""Of each, (first, end) of its weights among a layer's seven: q, k, v, output, gate, up, down."""
_ATTENTION_NORM, _MLP_NORM, _QUERY_NORM, _KEY_NORM, _WINDOW, _BIASES = range(6)
"""Columns of `layers`: addresses of norms, the window, addresses of seven biases; 0 where there is none."""
_NONE = np.int64(0)
_FIXED, _SHARED = 1, 2
"""Bits of `ways`, of each layer and group: v3 multiplies where it can; all threads share the rows."""


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """One decoder layer, all in float32 but the weights.

    norms     before attention and before the MLP, (hidden,); of queries and of keys, (head_dim,) or None
    linears   q, k and v; output; gate and up; down
    biases    of the seven weights in this order, (rows,) or None
    window    tokens that a new one looks at; None: all
    """

    norms: tuple[Any, Any, Any, Any]
    linears: Sequence[Linears]
    biases: Sequence[Any]
    window: int | None


class DecodeLayers:
    """The layers of a model, all of the same sizes; checked once, here.

    head_dim   numbers of a query, a key and a value of one head
    eps        of all norms
    scale      of the scores

    Raises ShapeError, DtypeError, LayoutError, KindError, RangeError (errors.py).
    """

    def __init__(self, layers: Sequence[LayerArrays], *, head_dim: int, eps: float, scale: float) -> None:
        for i, layer in enumerate(layers):
            _check(f"layers[{i}]", layer, layers[0], head_dim)
        self._kept = tuple(layers)  # the tables hold addresses alone
        self._numbers = (float(eps), float(scale))
        self._windows = {check_window(layer.window) for layer in layers}
        self._rows = np.array([rows for linears in layers[0].linears for rows in linears.rows], np.int64)
        heads, kv_heads = (int(rows) // head_dim for rows in self._rows[:2])
        self._sizes = (len(layers), heads, kv_heads, head_dim)
        self._tables = np.stack([np.concatenate([each.table for each in layer.linears]) for layer in layers])
        self._layers = np.array([_numbers_of(layer) for layer in layers], np.int64)

    def ways(self, n: int, fixed: Sequence[Sequence[bool]]) -> np.ndarray:
        """How to multiply n rows, for __call__: (layers, 4) int64.

        fixed   for the four groups of each layer, as for Linears: whether v3 multiplies where it can, or v2
        """
        ways = np.zeros((len(self._kept), len(_GROUPS)), np.int64)
        for row, layer, chosen in zip(ways, self._kept, fixed, strict=True):
            shared = [linears.shared(n) for linears in layer.linears]
            row[:] = _FIXED * np.array(chosen) + _SHARED * np.array(shared)
        return ways

    def __call__(
        self, x: Any, paged: PagedPass, ways: np.ndarray, meet: Callable[[np.ndarray], None] | None = None
    ) -> Any:
        """Run all layers; returns what the last MLP adds to x, for the norm that follows: (n, hidden).

            x      (n, hidden) float32, contiguous, an array or a tensor on the CPU; changed in place
            ways   of self.ways(n, ...)
            meet   adds to delta (n, hidden), in place, what others have of it: called after each half of a
                   layer, while no kernel runs; None where these layers are whole

        Keys and values of the new tokens are written to their pages. Raises ShapeError, DtypeError,
        LayoutError, KindError, RangeError.
        """
        arrays.check_integer("x", x, "float32")
        arrays.check_shape("x", x, "n", self._kept[0].linears[0].width)
        arrays.check_contiguous("x", x)
        arrays.check_writable("x", x)
        caches, new, context, split = paged.for_decode(x.shape[0], *self._sizes, self._windows)
        delta = arrays.empty_like(x)
        model = (self._layers, self._tables, self._rows, ways)
        views = (arrays.as_numpy(x), arrays.as_numpy(delta))
        given = (_known(), model, *views, caches, new, context, (*self._numbers, split), get_num_threads())
        halves = 2 * len(self._kept)
        for half in range(0, halves, 1 if meet else halves):
            with PARALLEL_CALL:
                decode_layers(*given, half, half + 1 if meet else halves)
            if meet:
                meet(views[1])
        return delta


def _check(name: str, layer: LayerArrays, first: LayerArrays, head_dim: int) -> None:
    """A layer's sizes fit together and are those of the first; its norms and biases are plain arrays."""
    sizes, wanted = ([(each.width, *each.rows) for each in some.linears] for some in (layer, first))
    (hidden, query, key, *_), _, (_, gate, *_), _ = sizes
    fitting = [(hidden, query, key, key), (query, hidden), (hidden, gate, gate), (gate, hidden)]
    if sizes != wanted or sizes != fitting or query % head_dim or key % head_dim:
        raise ShapeError(f"{name}.linears", sizes, f"{fitting}, whole heads of {head_dim}, in all layers")
    lengths = [hidden, hidden, head_dim, head_dim, *(rows for _, *group in sizes for rows in group)]
    for i, (array, length) in enumerate(zip((*layer.norms, *layer.biases), lengths, strict=True)):
        part = f"{name}.norms[{i}]" if i < len(layer.norms) else f"{name}.biases[{i - len(layer.norms)}]"
        if array is not None:
            arrays.check_integer(part, array, "float32")
            arrays.check_shape(part, array, length)
            arrays.check_contiguous(part, array)


def _numbers_of(layer: LayerArrays) -> list[int]:
    """A row of `layers`."""
    norms, biases = (
        [0 if array is None else arrays.address_of(array) for array in some]
        for some in (layer.norms, layer.biases)
    )
    return [*norms, check_window(layer.window), *biases]


_KERNELS: tuple[tuple[Any, str], ...] = (
    (norm_v1, "int64, int64, int64, float64, int64, int64, int64, int64"),
    (silu_v1, "int64, int64, int64, int64, int64"),
    (linear_v2, "int64[:, ::1], int64, int64, int64, int64, int64, boolean"),
    (linear_v2_parallel, "int64[:, ::1], int64, int64, int64, int64, int64, boolean, int64"),
    (
        scatter_rotated,
        "int64, int64, float32[:, :, :, ::1], int64[::1], float32[:, :, ::1], float32[:, :, ::1], int64[::1],"
        "int64, int64, int64",
    ),
    (move_tokens, "int64, int64, int64, int64[::1], int64, int64, int64"),
    (
        decode_v3,
        "float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int32[:, ::1], int32[::1],"
        "float32[:, :, ::1], float64, int64, int64, int64",
    ),
)
"""In the order of `known`, with the types that Python's calls compile them for."""


def _types_of(index: int) -> tuple[Any, ...]:
    return tuple(sigutils.normalize_signature(f"({_KERNELS[index][1]})")[0])


@functools.cache
def _known() -> np.ndarray:
    """Compile or load the kernels; where they lie."""
    known = np.array([0] * len(_KERNELS) + [HALVES_ADDRESS])
    for index, (kernel, _) in enumerate(_KERNELS):
        kernel.compile(_types_of(index))
        compiled = kernel.overloads[_types_of(index)]
        known[index] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return known


@intrinsic(prefer_literal=True)
def _call(typing_context, known, index, arguments):
    """Call a kernel with a tuple of what it takes, as Numba calls functions that are values
    (numba.core.lowering). An error that it raises is passed on.
    """
    kinds = _types_of(index.literal_value)
    if tuple(map(types.unliteral, arguments.types)) != kinds:
        raise TypingError(f"{_KERNELS[index.literal_value][0].__name__} takes {kinds}, not {arguments.types}")

    def generate(context, builder, signature, values):
        convention = context.call_conv
        table = context.make_array(known)(context, builder, values[0])
        address = builder.load(builder.gep(table.data, [LONG(index.literal_value)]))
        kernel = builder.inttoptr(address, convention.get_function_type(types.none, kinds).as_pointer())
        unpacked = cgutils.unpack_tuple(builder, values[2])
        status, _ = convention.call_function(builder, kernel, types.none, kinds, unpacked)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(known, index, arguments), generate


@register_jitable
def _at(array):
    """Where it begins. Numba knows of no use of an address: `keep` the array for as long."""
    return np.int64(array.ctypes.data)


@njit(**PART)
def _norm(known, x, add, weight, eps, out, rows, width, workers):
    """As row_kernels.rms_norm."""
    workers = workers if rows * width >= PARALLEL_VALUES else 1
    _call(known, _NORM, (x, add, weight, eps, out, rows, width, workers))


@njit(**PART)
def _multiply(known, model, i, group, x, n, width, out, workers):
    """As Linears: n rows of x times each weight of a group of layer i, one product after the other."""
    layers, tables, rows, ways = model
    first, end = _GROUPS[group]
    job = (tables[i, first:end], known[_HALVES], x, n, width, out, ways[i, group] & _FIXED != 0)
    if ways[i, group] & _SHARED:
        _call(known, _LINEAR_PARALLEL, job + (workers,))
    else:
        _call(known, _LINEAR, job)
    for weight in range(first, end):
        bias, count = layers[i, _BIASES + weight], rows[weight]
        if bias:
            values = floats_at(bias, count)
            for row in range(n):
                sums = floats_at(out + 4 * row * count, count)
                for r in range(count):
                    sums[r] += values[r]
        out += 4 * n * count


@njit(**PART)
def _norm_heads(known, layer, eps, query, key, heads, kv_heads, head_dim, workers):
    """The norms of `heads` queries and `kv_heads` keys, where the family has them."""
    if layer[_QUERY_NORM] and layer[_KEY_NORM]:
        normed = np.empty(max(heads, kv_heads) * head_dim, np.float32)
        place = _at(normed)
        _norm(known, query, _NONE, layer[_QUERY_NORM], eps, place, heads, head_dim, workers)
        copy_bytes(query, place, 4 * heads * head_dim)
        _norm(known, key, _NONE, layer[_KEY_NORM], eps, place, kv_heads, head_dim, workers)
        copy_bytes(key, place, 4 * kv_heads * head_dim)
        keep(normed)


@njit(**PART)
def _write(known, keys, values, new, query, key, value, heads):
    """As PagedPass.write: k turned, and v, into a layer's pages; q turned where it lies."""
    slots, positions, cosine, sine = new
    _, kv_heads, page_size, head_dim = keys.shape
    row_bytes = 4 * head_dim
    step = kv_heads * row_bytes
    turned = (query, heads * row_bytes, heads)
    _call(known, _TURN, (key, step, keys, slots, cosine, sine, positions) + turned)
    _call(known, _MOVE, (_at(values), value, step, slots, kv_heads, page_size, row_bytes))


@njit(cache=True, nogil=True)
def decode_layers(known, model, x, delta, caches, new, context, numbers, workers, first, end):
    """Halves `first` to `end` of the layers, as Model.forward computes them: two for each layer.

    known, model = (layers, tables, rows, ways)   as DecodeLayers has them
    x, delta               (n, hidden) float32; delta is what the half before has left, for half 0 anything
    caches, new, context   of PagedPass.for_decode
    numbers                (eps of the norms, scale of the scores, split as for decode_v3)
    """
    (n, hidden), layers, rows = x.shape, model[0], model[2]
    (tables, lens), (eps, scale, split) = context, numbers
    kv_heads, head_dim = caches.shape[3], caches.shape[5]
    width, kv_width, inside = rows[0], rows[1], rows[4]
    heads = width // head_dim
    normed, projected = np.empty(n * hidden, np.float32), np.empty(n * (width + 2 * kv_width), np.float32)
    query = projected[: n * width].reshape(n, heads, head_dim)
    attended, inner = np.empty(query.shape, np.float32), np.empty(2 * n * inside, np.float32)
    at_x, at_delta, at_normed, at_query = _at(x), _at(delta), _at(normed), _at(projected)
    at_attended, at_gate = _at(attended), _at(inner)
    at_key = at_query + 4 * n * width
    at_value, at_up = at_key + 4 * n * kv_width, at_gate + 4 * n * inside
    for half in range(first, end):
        i, add = half // 2, at_delta if half else _NONE
        layer, keys, values = layers[i], caches[i, 0], caches[i, 1]
        if half % 2 == 0:
            _norm(known, at_x, add, layer[_ATTENTION_NORM], eps, at_normed, n, hidden, workers)
            _multiply(known, model, i, _QKV, at_normed, n, hidden, at_query, workers)
            _norm_heads(known, layer, eps, at_query, at_key, n * heads, n * kv_heads, head_dim, workers)
            _write(known, keys, values, new, at_query, at_key, at_value, heads)
            seen = (query, keys, values, tables, lens, attended, scale, layer[_WINDOW], split, workers)
            _call(known, _ATTEND, seen)
            _multiply(known, model, i, _OUTPUT, at_attended, n, width, at_delta, workers)
        else:
            _norm(known, at_x, add, layer[_MLP_NORM], eps, at_normed, n, hidden, workers)
            _multiply(known, model, i, _GATE_UP, at_normed, n, hidden, at_gate, workers)
            shared = workers if n * inside >= PARALLEL_VALUES else 1
            _call(known, _SILU, (at_gate, at_up, n, inside, shared))
            _multiply(known, model, i, _DOWN, at_gate, n, inside, at_delta, workers)
    for array in (normed, projected, inner):
        keep(array)
