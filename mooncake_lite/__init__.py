"""mooncake-lite: a KVCache-centric, disaggregated LLM server that a student can read.

    cli.py  serve_command.py  rank.py    the command; `serve`; one MPI rank from start to end
    conductor/ control/                  rank 0, and the decisions that it carries out
    ranks/  engine/ model/               ranks that compute or store, and what they compute with
    gateway/                             HTTP
    launch/ config/ profiles/ messages/  starting a cluster, its settings, measured costs, the wire
    simulator/ tracing/                  the same control plane in virtual time; traces of runs
    labs/  tools/                        the course; benchmarks, demo, top, doctor, the pool's commands

tests/test_architecture.py lists which folder may import which.
"""

__version__ = "0.1.0"
