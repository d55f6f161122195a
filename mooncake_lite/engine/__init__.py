"""Runs a model over paged KV on one rank. Start reading at runner.py."""

from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.sampler import Drawn, sample
from mooncake_lite.engine.staging import StagingBlocks

__all__ = ["Drawn", "Engine", "Runner", "StagingBlocks", "sample"]
