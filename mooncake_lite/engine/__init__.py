"""Runs a model over paged KV on one rank. Start reading at engine.py."""

from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.pages import OutOfPages, PagePool, pages_for
from mooncake_lite.engine.sampler import sample
from mooncake_lite.engine.sequence import Sequence

__all__ = ["Engine", "OutOfPages", "PagePool", "Sequence", "pages_for", "sample"]
