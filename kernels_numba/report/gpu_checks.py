"""Checks of attention on a GPU against torch in float64: parts "decode", "prefill" and "graph" of gpu_report.

Needs torch; knows the public functions, and the rungs behind them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kernels_numba
from kernels_numba.attention import attention_cuda, attention_decode_cuda
from kernels_numba.checks import NO_WINDOW

Check = tuple[str, Callable[[], str]]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Largest error of a number, as a share of the root mean square of its row, which long contexts make small.
Some numbers are five times that: half a unit of their last place, plus the weights' rounding on tensor cores;
float32: the sums' and the hardware's exp2."""


@dataclass
class Paged:
    """Ragged sequences in shuffled pages; NaN in every page and slot that is not used."""

    query: Any
    key_cache: Any
    value_cache: Any
    tables: Any
    new: Any
    lens: Any
    scale: float

    @property
    def pages(self) -> tuple[Any, Any, Any, Any]:
        """The query, the pages and the tables, as every kernel takes them."""
        return self.query, self.key_cache, self.value_cache, self.tables

    def expected(self, window: int | None = None) -> Any:
        """Causal attention in float64, (tokens, heads, head_dim)."""
        heads, head_dim = self.query.shape[1:]
        group = heads // self.key_cache.shape[1]
        wanted = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        row, page_size = 0, self.key_cache.shape[2]
        for b, (new, tokens) in enumerate(zip(self.new.tolist(), self.lens.tolist())):
            if new and tokens:
                pages = self.tables[b, : -(-tokens // page_size)].long()
                keys, values = (
                    cache[pages].transpose(0, 1).reshape(-1, len(pages) * page_size, head_dim)[:, :tokens]
                    for cache in (self.key_cache, self.value_cache)
                )
                keys, values = (kv.double().repeat_interleave(group, 0) for kv in (keys, values))
                scores = self.query[row : row + new].double().transpose(0, 1) @ keys.transpose(1, 2)
                last = torch.arange(tokens - new, tokens, device=DEVICE)[:, None]
                t = torch.arange(tokens, device=DEVICE)[None]
                hidden = (t > last) | (t <= last - (window or NO_WINDOW))
                weights = (scores * self.scale).masked_fill(hidden, -torch.inf).softmax(-1)
                wanted[row : row + new] = (weights @ values).transpose(0, 1)
            row += new
        return wanted


def make_paged(
    dtype: Any, lens: list[int], new: list[int], sizes: tuple[int, int, int], page_size: int = 16
) -> Paged:
    """Random sequences of `lens` tokens, the last `new` new; sizes: heads, kv_heads, head_dim."""
    heads, kv_heads, head_dim = sizes
    needed = [-(-n // page_size) for n in lens]
    shape = (sum(needed) + 3, kv_heads, page_size, head_dim)
    order = torch.randperm(shape[0])
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    tables = torch.full((len(lens), max(needed) + 2), 2**31 - 1, dtype=torch.int32)
    first = 0
    for b, count in enumerate(needed):
        pages = order[first : first + count]
        tables[b, :count], first = pages.int(), first + count
        for cache in (key_cache, value_cache):
            rows = torch.full((count * page_size, kv_heads, head_dim), torch.nan, device=DEVICE)
            rows[: lens[b]] = torch.randn(lens[b], kv_heads, head_dim, device=DEVICE)
            by_page = rows.view(count, page_size, kv_heads, head_dim).transpose(1, 2)
            cache[pages.to(DEVICE)] = by_page.to(dtype)
    return Paged(
        query=torch.randn(sum(new), heads, head_dim, device=DEVICE).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        tables=tables.to(DEVICE),
        new=torch.tensor(new, dtype=torch.int32, device=DEVICE),
        lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        scale=head_dim**-0.5,
    )


def compare(found: Any, wanted: Any) -> str:
    """The largest error, as TOLERANCE; raises AssertionError when it is too large or not a number."""
    size = wanted.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9)  # of a row that must be zeros
    error = ((found.double() - wanted).abs() / size).max().item()
    allowed = TOLERANCE[found.dtype]
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    return f"error {error:.2g}"


SHAPES = (  # dtype, heads, kv_heads, head_dim
    (torch.bfloat16, 32, 8, 128),
    (torch.bfloat16, 9, 3, 64),
    (torch.bfloat16, 40, 2, 128),
    (torch.bfloat16, 6, 2, 72),
    (torch.float16, 8, 8, 128),
    (torch.float16, 128, 1, 64),
    (torch.float16, 4, 2, 256),
    (torch.float32, 9, 3, 64),
    (torch.float32, 8, 2, 128),
    (torch.float32, 2, 1, 256),
)


LENS = (1, 17, 300, 2049, 0, 5000)


def _decode(shape: Any, window: int | None, page_size: int, lens: Sequence[int] = LENS) -> str:
    paged = make_paged(shape[0], list(lens), [1] * len(lens), shape[1:], page_size)
    out = torch.full_like(paged.query, torch.nan)
    options = {} if window is None else {"window": window}
    found = kernels_numba.paged_attention_decode(
        *paged.pages, paged.lens, scale=paged.scale, out=out, **options
    )
    assert found is out
    return compare(found, paged.expected(window))


def _decode_without_tensor_cores() -> str:
    paged = make_paged(torch.bfloat16, [700, 33], [1, 1], (9, 3, 64))
    out = torch.full_like(paged.query, torch.nan)
    attention_decode_cuda.launch_split(*paged.pages, paged.lens, paged.scale, out, tensor_cores=False)
    return compare(out, paged.expected())


def decode_checks() -> Iterator[Check]:
    """Every shape, with and without a window, on the default stream and on another."""
    for shape in SHAPES:
        for window, page_size in ((None, 16), (100, 32)):
            title = f"decode {shape[0]} {shape[1:]} window {window}"
            yield title, partial(_decode, shape, window, page_size)
    for shape in SHAPES[:2]:
        yield f"decode {shape[0]} {shape[1:]} of 16384 tokens", partial(_decode, shape, None, 16, [16384])
    yield "decode v3 bfloat16", _decode_without_tensor_cores

    def beside() -> str:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            return _decode(SHAPES[0], None, 16)

    yield "decode on a stream of its own", beside


def _prefill(shape: Any, window: int | None, page_size: int, **options: Any) -> str:
    lens, new = [5, 700, 64, 129, 1000], [5, 300, 0, 1, 513]
    paged = make_paged(shape[0], lens, new, shape[1:], page_size)
    out = torch.full_like(paged.query, torch.nan)
    arrays = (*paged.pages, paged.new, paged.lens)
    if options:
        launch = options.pop("launch", attention_cuda.launch_prefill)
        launch(*arrays, paged.scale, out, window or NO_WINDOW, **options)
    else:
        chosen = {} if window is None else {"window": window}
        kernels_numba.paged_attention_prefill(*arrays, scale=paged.scale, out=out, **chosen)
    return compare(out, paged.expected(window))


def prefill_checks() -> Iterator[Check]:
    """Every shape, with and without a window; the tensor-core kernel of eight warps; the plain rungs."""
    for shape in SHAPES:
        for window, page_size in ((None, 16), (100, 32)):
            title = f"prefill {shape[0]} {shape[1:]} window {window}"
            yield title, partial(_prefill, shape, window, page_size)
    yield "prefill of eight warps", lambda: _prefill(SHAPES[0], None, 16, warps=8)
    for name in ("launch_plain", "launch_shared", "launch_tiled"):
        launch = getattr(attention_cuda, name)
        yield f"prefill {name}", partial(_prefill, SHAPES[1], 50, 8, launch=launch)


def captured(action: Callable[[], object]) -> Callable[[], object]:
    """`action` as a graph: a synchronisation in it, or an allocation not by torch, raises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def _graph(dtype: Any, layers: int) -> str:
    """A decode step of `layers` layers: write the new token, in every second one turning keys and queries,
    and attend. Captured once, replayed three times with other inputs."""
    paged = make_paged(dtype, [900, 33, 1200], [1, 1, 1], (32, 8, 128))
    new = torch.randn(3, 2, 8, 128, device=DEVICE).to(dtype)
    slots, positions = (torch.zeros(3, dtype=torch.int64, device=DEVICE) for _ in range(2))
    out, angles = torch.empty_like(paged.query), torch.rand(1300, 1, 64, device=DEVICE) * 6
    cosine = torch.cat((angles.cos(), angles.cos()), -1)
    sine = torch.cat((-angles.sin(), angles.sin()), -1)
    finite = [cache.nan_to_num() for cache in (paged.key_cache, paged.value_cache)]
    caches = [[cache.clone() for cache in finite] for _ in range(layers)]
    turned: Any = {"rotary": (cosine, sine), "positions": positions, "query": paged.query}

    def step() -> None:
        for layer, (keys, values) in enumerate(caches):
            options = turned if layer % 2 == 0 else {}
            kernels_numba.scatter_kv(new[:, 0], new[:, 1], keys, values, slots, **options)
            kernels_numba.paged_attention_decode(
                paged.query, keys, values, paged.tables, paged.lens, scale=paged.scale, out=out
            )
            paged.query.copy_(out)

    inputs = (paged.query, paged.lens, new, slots, positions)
    replay = captured(step)
    worst = 0.0
    for lens in ([900, 33, 1200], [17, 40, 1], [550, 1, 1000]):
        fresh = [torch.randn_like(paged.query), torch.tensor(lens, dtype=torch.int32, device=DEVICE)]
        last = fresh[1].long() - 1
        page = paged.tables[torch.arange(3, device=DEVICE), last // 16].long()
        fresh += [torch.randn_like(new), page * 16 + last % 16, last]
        results = []
        for action in (step, replay):
            for target, value in zip(inputs, fresh):
                target.copy_(value)
            for layer in caches:
                for cache, value in zip(layer, finite):
                    cache.copy_(value)
            allocated = torch.cuda.memory_allocated()
            action()
            if action is not step:
                assert torch.cuda.memory_allocated() == allocated, "the replay allocated"
            results.append(out.clone())
        worst = max(worst, (results[0].double() - results[1].double()).abs().max().item())
        assert torch.equal(*results), f"replay differs from eager by {worst}"
        assert results[0].isfinite().all()
    return f"{layers} layers, 3 replays with other inputs, equal to the last bit"


def _graph_prefill() -> str:
    paged = make_paged(torch.bfloat16, [300, 64], [40, 24], (8, 2, 64))
    arrays = (*paged.pages, paged.new, paged.lens)
    out = torch.empty_like(paged.query)
    replay = captured(partial(kernels_numba.paged_attention_prefill, *arrays, scale=paged.scale, out=out))
    paged.query.copy_(torch.randn_like(paged.query))
    out.fill_(torch.nan)
    replay()
    return compare(out, paged.expected())


def graph_checks() -> Iterator[Check]:
    """Capture through torch.cuda.graph, without allocation or synchronisation, replayed with other inputs."""
    yield "graph of a decode step, bfloat16", lambda: _graph(torch.bfloat16, 4)
    yield "graph of a decode step, float32", lambda: _graph(torch.float32, 2)
    yield "graph of a prefill", _graph_prefill
