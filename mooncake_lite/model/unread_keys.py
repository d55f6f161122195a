"""Keys of config.json that change what a model computes and that are not read: a folder with one is refused.

Used by config.py, which has the keys that are read. Keys that come with tensors of their own (experts, norms,
biases) are not here: weights.py refuses a tensor that the family does not have. Explained in
docs/how-to/own-model.md.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ModelError

_SHARED: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "decoder": (),
    "generator": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_sharing_modes": (),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "text_config": (),
    "text_encoder": (),
    "transformers_weights": ("model.safetensors",),
}
"""key -> values without effect. All classes of transformers have these, or the code that they share reads
them."""

_OF_OTHER_FAMILIES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
}
"""The same, of Gemma, Granite, Cohere and others. In our families transformers ignores these. A folder that
has them was made for other code, and its answers would be worse here without a word."""

NEUTRAL = _SHARED | _OF_OTHER_FAMILIES


def refuse_unread(named: dict[str, Any], path: Path) -> None:
    """Raise ModelError when `named`, of the file at `path`, has such a key with an effect; null has none."""
    for key, neutral in NEUTRAL.items():
        value = named.get(key)
        if value is not None and value not in neutral:
            supported = f"; supported is {reprlib.repr(neutral[0])}" if neutral else ""
            raise ModelError(f"{path}: {key}={reprlib.repr(value)} is not supported{supported}")
