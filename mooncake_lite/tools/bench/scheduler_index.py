"""What the scheduler's prefix index costs with a million blocks: a walk, changes and memory.

Run by `bench scheduler`. The limit of a change is that of a plain dictionary from key to place. The limit
of a walk is one access for each key.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

from mooncake_lite.tools.bench.result import Other, Row
from scheduler import PrefixIndex

PROMPT_BLOCKS = 250
RUN_BLOCKS = 24
NODES = 64
PLAIN = "the same change of a plain dictionary"
WALKS = 2000

DYNAMO = (
    Other("Dynamo's indexer, 24 threads", 170e6),
    Other("Dynamo's indexer, an earlier form", 4e6),
    Other("Dynamo's indexer, its naive form", 385e3),
)
"""Published, in block operations/s."""

SGLANG = Other("SGLang's tree, one insert", 1.0)
"""Published, in us."""

Prompts = list[list[int]]


def run(quick: bool) -> list[Row]:
    """Measure an index of a million blocks, or with `quick` of a hundred thousand."""
    blocks = 100_000 if quick else 1_000_000
    rows = [*walks(blocks), *by_runs(blocks), one_by_one(blocks), memory(blocks)]
    gc.unfreeze()
    return rows


def walks(blocks: int) -> list[Row]:
    """Measure walks over prompts that one node holds, and another one up to some block."""
    prompts = some_prompts(blocks, PROMPT_BLOCKS)
    index = index_of(prompts)
    random_ = random.Random(1)
    for number, keys in enumerate(prompts):
        index.stored_run(keys[: random_.randrange(PROMPT_BLOCKS)], 0, (number + 1) % NODES, "dram")
    asked = [[*random_.choice(prompts)] for _ in range(WALKS)]
    walk = median_us(index.leading, asked)
    columns = median_us(lambda keys: index.leading(keys).near_columns(), asked)
    limit = accesses(asked)
    shape = f"{PROMPT_BLOCKS} blocks, index of {blocks:,}"
    return [
        Row(f"leading, {shape}", "us", walk, None, limit, WALKS),
        Row(f"leading by node, {NODES} nodes, {shape}", "us", columns, None, limit, WALKS),
    ]


def by_runs(blocks: int) -> list[Row]:
    """Store runs in an empty index, and remove them in random order."""
    runs = some_prompts(blocks, RUN_BLOCKS)
    order = random.Random(1).sample(runs, len(runs))
    index, plain = index_of([]), dict[int, int]()

    def store() -> None:
        for keys in runs:
            index.stored_run(keys, 0, 0, "dram")

    def remove() -> None:
        for keys in order:
            index.removed_run(keys, 0, "dram")

    def store_plain() -> None:
        for keys in runs:
            plain.update(dict.fromkeys(keys, 1))

    def remove_plain() -> None:
        for keys in order:
            deque(map(plain.__delitem__, keys), 0)

    changes = 2 * RUN_BLOCKS * len(runs)
    stored_s, removed_s = seconds(store), seconds(remove)
    plain_stored_s, plain_removed_s = seconds(store_plain), seconds(remove_plain)
    each_us, per_s = stored_s / len(runs) * 1e6, changes / (stored_s + removed_s)
    limit_us = Other(PLAIN, plain_stored_s / len(runs) * 1e6)
    limit_per_s = Other(PLAIN, changes / (plain_stored_s + plain_removed_s))
    shape = f"{RUN_BLOCKS}, {blocks:,} blocks"
    rows = [Row(f"index: store a run of {shape}", "us", each_us, None, limit_us, 1, published=(SGLANG,))]
    name = f"index: store and remove runs of {shape}"
    return [*rows, Row(name, "blocks/s", per_s, None, limit_per_s, 1, published=DYNAMO)]


def one_by_one(blocks: int) -> Row:
    """Remove all blocks of long runs one by one, in random order."""
    prompts = some_prompts(blocks, PROMPT_BLOCKS)
    index, plain = index_of(prompts), {key: 1 for keys in prompts for key in keys}
    order = [(key, number % NODES) for number, keys in enumerate(prompts) for key in keys]
    random.Random(1).shuffle(order)

    def ours() -> None:
        for key, holder in order:
            index.removed(key, holder, "dram")

    def limit() -> None:
        for key, _ in order:
            del plain[key]

    bound = Other(PLAIN, blocks / seconds(limit))
    name = f"index: remove single blocks of runs of {PROMPT_BLOCKS}, {blocks:,} blocks"
    return Row(name, "blocks/s", blocks / seconds(ours), None, bound, 1)


def memory(blocks: int) -> Row:
    """Measure what Python allocates for the index, keys included."""
    tracemalloc.start()
    index = index_of(some_prompts(blocks, PROMPT_BLOCKS))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == blocks
    return Row(f"index: memory, {blocks:,} blocks", "MB", nbytes / 1e6, None, None, 1)


def some_prompts(blocks: int, each: int) -> Prompts:
    """Make prompts of `each` random keys, this many blocks in all."""
    random_ = random.Random(0)
    return [[random_.getrandbits(63) for _ in range(each)] for _ in range(blocks // each)]


def index_of(prompts: Prompts) -> PrefixIndex:
    """Make an index with prompts that lie on one node each."""
    index = PrefixIndex()
    for holder in range(NODES):
        index.add_holder(holder, holder)
    for number, keys in enumerate(prompts):
        index.stored_run(keys, 0, number % NODES, "dram")
    return index


def median_us(call: Callable[[list[int]], object], prompts: Prompts) -> float:
    """Return the median time of a call in us."""
    settle()
    taken = []
    for keys in prompts:
        began = time.perf_counter()
        call(keys)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def accesses(prompts: Prompts) -> Other:
    """Measure the limit of any prefix index in Python, in us per prompt."""
    known = {key: 1 for keys in prompts for key in keys}
    return Other(
        "one dictionary access for each key", median_us(lambda keys: [*map(known.get, keys)], prompts)
    )


def seconds(action: Callable[[], None]) -> float:
    """Return the duration of an action."""
    settle()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def settle() -> None:
    """Keep what exists from being searched for garbage during a measurement."""
    gc.collect()
    gc.freeze()
