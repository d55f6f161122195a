"""mooncake-lite: a KVCache-centric, disaggregated LLM server that a student can read.

    cli.py  serve_command.py  rank.py    the command; `serve`; one MPI rank from start to end
    llm.py                               the library: `from mooncake_lite import LLM`
    conductor/ control/                  rank 0, and the decisions that it carries out
    ranks/  engine/ model/               ranks that compute or store, and what they compute with
    gateway/                             HTTP
    launch/ config/ profiles/ messages/  starting a cluster, its settings, measured costs, the wire
    simulator/ tracing/                  the same control plane in virtual time; traces of runs
    labs/  tools/                        the course; benchmarks, demo, top, doctor, the pool's commands

tests/test_architecture.py lists which folder may import which.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `LLM` and `SamplingParams` when they are asked for: everything else here stays light."""
    if name in ("LLM", "SamplingParams"):
        return getattr(import_module(f"{__name__}.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
