"""Keys of config.json that change what a model computes and that are not read: a folder with one is refused.

Used by config.py, which has the keys that are read. Keys that come with tensors of their own (experts, norms,
biases) are not here: weights.py refuses a tensor that the family does not have. Explained in
docs/how-to/own-model.md.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ModelError

_SHARED: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "decoder": (None,),
    "generator": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_sharing_modes": (None,),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "text_config": (None,),
    "text_encoder": (None,),
    "transformers_weights": (None, "model.safetensors"),
}
"""key -> values without effect. All classes of transformers have these, or the code that they share reads
them. is_causal has an effect there even as null."""

_OF_OTHER_FAMILIES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
}
"""The same, of Gemma, Granite, Cohere and others. In our families transformers ignores these. A folder that
has them was made for other code, and its answers would be worse here without a word."""

NEUTRAL = _SHARED | _OF_OTHER_FAMILIES


def refuse_unread(named: dict[str, Any], path: Path) -> None:
    """Raise ModelError when `named`, of the file at `path`, has such a key with an effect."""
    for key, neutral in NEUTRAL.items():
        if key in named and named[key] not in neutral:
            supported = " or ".join(json.dumps(value) for value in neutral)
            raise ModelError(
                f"{path}: {key}={reprlib.repr(named[key])} is not supported; supported is {supported}"
            )
