"""Sizes that follow from a configuration and a model: blocks, pages, segments, the context.

Used by preflight (before launch) and by every rank, so that both compute the same. Raises ConfigError with
the fix when something cannot hold what it must.
"""

from __future__ import annotations

from mooncake_lite.config.instances import context_size, members_of, tensor_size
from mooncake_lite.config.modes import COMPUTE_ROLES, mode_of
from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import ITEMSIZE, ModelConfig
from mooncake_lite.model.shares import PIECE_TOKENS, Share, shares_of, whole
from scheduler.instance.dealt_pages import pages_of_rows, tokens_of_rows
from store.allocator import padded_size
from store.errors import LayoutError
from store.layout import BlockLayout

MIN_STAGING_BLOCKS = 6
"""Of a compute rank's segment: two halves of two for loads and stores, two for what decode gives back."""

EXCHANGE_PIECE_BYTES = 1 << 20
"""Members exchange longer data in pieces of so many bytes: a decode step fits, a long prompt does not."""

HIDDEN_SLOTS = 2
"""Passes by which a stage may be ahead of the next one. With one, a short pass would keep it waiting."""

SAVE_SLOTS, LOAD_SLOTS = 16, 8
"""Blocks of a store rank's own memory, through which it writes lent blocks to its tier and reads blocks of
the tier for other ranks' DRAM. 16 is what the tier's writer takes at once: fewer would keep it waiting."""


def block_layout(config: ServeConfig, model: ModelConfig) -> BlockLayout:
    """Layout of one pool block. Raises ConfigError when the codec cannot encode this model's heads."""
    sizes = (model.layers, model.kv_heads, config.block_size, model.head_dim, ITEMSIZE[config.dtype])
    try:
        return BlockLayout(*sizes, config.kv_codec)
    except LayoutError as error:
        raise ConfigError(f"kv_{error}") from None


def page_nbytes(config: ServeConfig, model: ModelConfig) -> int:
    """Bytes of one engine page, all layers, keys and values."""
    return block_layout(config, model).cache_nbytes * PAGE_TOKENS // config.block_size


def shares_of_role(config: ServeConfig, model: ModelConfig, role: str) -> list[Share]:
    """What the ranks of an instance hold whose first rank has this role. Errors as in shares_of."""
    stages = config.pipeline_parallel_size if role == "prefill" else 1
    return shares_of(model, stages, tensor_size(config, role), context_size(config, role))


def unit_tokens(config: ServeConfig) -> int:
    """Tokens of a unit, in which contexts are dealt out: whole pieces of attention, and whole blocks."""
    return max(PIECE_TOKENS, config.block_size)


def num_pages(config: ServeConfig, model: ModelConfig, share: Share | None = None) -> int:
    """Pages of the KV cache of one rank that computes: as many as the largest share of its instance has."""
    largest = (share or whole(model)).largest(model)
    return config.kv_cache_bytes // page_nbytes(config, largest.part_of(model))


def hidden_nbytes(config: ServeConfig, model: ModelConfig) -> int:
    """Bytes of the hidden states of one token."""
    return model.hidden_size * ITEMSIZE[config.dtype]


def stage_bytes(config: ServeConfig, model: ModelConfig, role: str) -> int:
    """Bytes at the end of a rank's segment for hidden states, which the next stage of a pipeline reads."""
    if config.pipeline_parallel_size == 1 or role not in ("prefill", "stage"):
        return 0
    return HIDDEN_SLOTS * config.max_num_batched_tokens * hidden_nbytes(config, model)


def exchange_bytes(config: ServeConfig, role: str) -> int:
    """Bytes at the end of a first rank's segment through which the members of its instance exchange sums."""
    members = members_of(config, role)
    if members == 1:
        return 0
    from transport.exchange import SharedExchange

    return SharedExchange.nbytes(members, EXCHANGE_PIECE_BYTES)


def pool_bytes(config: ServeConfig, model: ModelConfig, role: str) -> int:
    """Bytes at the start of a rank's segment that the control plane gives out: whole blocks, as allocated."""
    block = padded_size(block_layout(config, model).nbytes)
    lent = config.lend_bytes if role in mode_of(config.mode).lenders else 0
    return (config.pool_bytes if role == "store" else lent) // block * block


def segment_bytes(config: ServeConfig, model: ModelConfig, role: str) -> int:
    """Bytes of a rank's segment: its part of the pool, a compute rank's staging blocks, and what its instance
    exchanges.

    Few blocks are enough where no KV moves.
    """
    in_pool = pool_bytes(config, model, role)
    if role not in COMPUTE_ROLES:
        return in_pool
    moves = config.has_pool or mode_of(config.mode).handover != "none"
    block = block_layout(config, model).nbytes
    staging = max(config.staging_bytes // block if moves else 0, MIN_STAGING_BLOCKS) * block
    return in_pool + staging + stage_bytes(config, model, role) + exchange_bytes(config, role)


def scratch_bytes(config: ServeConfig, model: ModelConfig, role: str) -> int:
    """Bytes of a store rank's private memory for saving and loading what other ranks hold of the pool."""
    if role != "store" or not config.ssd_dir:
        return 0
    slots = SAVE_SLOTS + LOAD_SLOTS if config.lend_bytes else LOAD_SLOTS if config.store > 1 else 0
    return slots * block_layout(config, model).nbytes


def context_length(config: ServeConfig, model: ModelConfig) -> int:
    """Tokens of prompt and answer together.

    Raises ConfigError when --max-model-len is beyond the model's context, when a KV cache or the memory
    between prefill and decode cannot hold one such request, when ranks lend less than one block, or when a
    pipeline has more stages than the model has layers; ModelError for more members than it has KV heads.
    """
    stages = config.pipeline_parallel_size
    if stages > model.layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages}, but the model has {model.layers} layers; use at most so many"
        )
    length = config.max_model_len or model.max_position
    if length > model.max_position:
        raise ConfigError(f"max_model_len={length}, but the model's context is {model.max_position} tokens")
    block = padded_size(block_layout(config, model).nbytes)
    if 0 < config.lend_bytes < block:
        raise ConfigError(
            f"lend_bytes={config.lend_bytes} holds no block of {block} B; raise it to that, or to 0"
        )
    _check_handover(config, block, length)
    for role in mode_of(config.mode).ranks:
        if role in COMPUTE_ROLES:
            _check_pages(config, model, shares_of_role(config, model, role)[0], length)
    return length


def _check_pages(config: ServeConfig, model: ModelConfig, share: Share, length: int) -> None:
    """Raise ConfigError when an instance cannot hold the KV of one request of this length."""
    page, turns = page_nbytes(config, share.part_of(model)), share.turns
    if turns > 1 and any(window is not None for window in model.windows):
        raise ConfigError(
            f"decode_context_parallel_size={turns}: layers of this model look at their newest tokens alone, "
            "which are few; leave it out"
        )
    rows = PAGE_TOKENS, unit_tokens(config), turns
    pages = pages_of_rows(length, *rows)
    if config.kv_cache_bytes // page < pages:
        tokens = tokens_of_rows(config.kv_cache_bytes // page, *rows)
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} holds {tokens} tokens, max_model_len is {length}; "
            f"raise kv_cache_bytes to {pages * page} or lower max_model_len"
        )


def _check_handover(config: ServeConfig, block: int, length: int) -> None:
    """Raise ConfigError when a request's KV does not fit where it lies between prefill and decode.

    block   bytes of one block, as allocated
    """
    mode = mode_of(config.mode)
    blocks = -(-length // config.block_size) + 1
    lent = config.lend_bytes // block
    if mode.handover == "direct" and lent < blocks:
        raise ConfigError(
            f"lend_bytes={config.lend_bytes} holds {lent} blocks of {block} B, a request of {length} tokens "
            f"needs {blocks}; raise lend_bytes to {blocks * block} or lower max_model_len"
        )
    all_lent = sum(role in mode.lenders for role in config.roles) * lent
    if mode.handover == "pool" and config.store * (config.pool_bytes // block) + all_lent < blocks:
        needed = -(-(blocks - all_lent) // config.store) * block
        size = f"{block} B" + (f" beside {all_lent} that are lent" if all_lent else "")
        raise ConfigError(
            f"pool_bytes={config.pool_bytes} holds {config.pool_bytes // block} blocks of {size}, a "
            f"request of {length} tokens needs {blocks}; raise pool_bytes to {needed} or lower max_model_len"
        )
