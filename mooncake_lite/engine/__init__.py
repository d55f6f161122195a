"""Runs a model over paged KV on one rank. Start reading at runner.py.

Names load their module at first use: a rank with an emulated engine imports neither torch nor kernels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_lite.engine.contract import ComputeEngine, Drawn
    from mooncake_lite.engine.emulated import EmulatedEngine
    from mooncake_lite.engine.engine import Engine
    from mooncake_lite.engine.runner import Runner
    from mooncake_lite.engine.sampler import sample
    from mooncake_lite.engine.staging import StagingBlocks

_HOME = {
    "ComputeEngine": "contract",
    "Drawn": "contract",
    "EmulatedEngine": "emulated",
    "Engine": "engine",
    "Runner": "runner",
    "StagingBlocks": "staging",
    "sample": "sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
