"""What `serve --trace` costs: TPOT of one stream with and without it.

Run by `bench.ideas`. Both clusters run at once and answer in turns; their ranks sleep otherwise.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from mooncake_lite.bench.engine_cluster import stream_times, tpot_s
from mooncake_lite.bench.engine_sides import in_turns, random_prompts
from mooncake_lite.bench.ideas_cluster import EMULATED, started
from mooncake_lite.bench.result import Other, Row

PROMPT_TOKENS = 64


def run(folder: Path, vocab: int, new: int, runs: int) -> list[Row]:
    """Measure answers of `new` tokens. Raises ClusterError."""
    prompts = random_prompts(1, PROMPT_TOKENS, vocab)
    flags = [str(folder), *EMULATED]
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        trace = str(Path(place) / "run.json")
        with started(flags) as plain, started([*flags, "--trace", trace]) as traced:
            off, on = in_turns(
                runs,
                lambda: 1e3 * tpot_s(stream_times(plain, prompts, new), new),
                lambda: 1e3 * tpot_s(stream_times(traced, prompts, new), new),
            )
    name = f"TPOT with --trace, one stream of {PROMPT_TOKENS} + {new} tokens"
    return [Row(name, "ms", statistics.median(on), Other("no trace", statistics.median(off)), None, runs)]
