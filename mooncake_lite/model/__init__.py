"""The model: a folder of weights and a tokenizer, made into token ids and logits.

Used by the engine, the gateway (its tokenizer only) and the command line; it knows nothing of
requests, ranks or the pool. Names load their module at first use, so that a process which only
tokenises never imports torch. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_lite.model.config import ModelConfig, load_config
    from mooncake_lite.model.fingerprint import weights_fingerprint
    from mooncake_lite.model.forward import AttentionBatch, Model, load_model
    from mooncake_lite.model.resolve import pull, resolve_model
    from mooncake_lite.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer

_HOME = {
    "ModelConfig": "config",
    "load_config": "config",
    "weights_fingerprint": "fingerprint",
    "AttentionBatch": "forward",
    "Model": "forward",
    "load_model": "forward",
    "pull": "resolve",
    "resolve_model": "resolve",
    "Detokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "AttentionBatch",
    "Detokenizer",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "load_config",
    "load_model",
    "load_tokenizer",
    "pull",
    "resolve_model",
    "weights_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
