"""Instances whose members compute in lockstep: which can be, which rank has which role, and their memory."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mooncake_lite.cli import main
from mooncake_lite.config.instances import context_size, instance_of, leading_roles, members_of, tensor_size
from mooncake_lite.config.reading import config_from
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.errors import ConfigError, ModelError
from mooncake_lite.launch.mpirun import rank_flags
from mooncake_lite.launch.threads import threads_for
from mooncake_lite.messages import RankHello
from mooncake_lite.model.shares import shares_of
from mooncake_lite.model.sizes import (
    EXCHANGE_PIECE_BYTES,
    block_layout,
    context_length,
    exchange_bytes,
    num_pages,
    page_nbytes,
    pool_bytes,
    segment_bytes,
    shares_of_role,
    unit_tokens,
)
from mooncake_lite.ranks.computing.build import computing_rank, limits_of
from mooncake_lite.ranks.computing.members import RankMemory
from scheduler.instance import Pages, Staging
from scheduler.instance.dealt_pages import DealtPages
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL
from transport.exchange import SharedExchange

pytestmark = pytest.mark.quick

MODEL = SMALL_MODEL.config
NINE = replace(MODEL, heads=9, kv_heads=3)
PAGE = 8192
"""Bytes of a page of MODEL."""

TWO, DEALT = {"tensor_parallel_size": 2}, {"decode_context_parallel_size": 2}


# ------------------------------------------------------------------------------- which ranks there are


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        (TWO, "prefill member decode member store"),
        ({**TWO, "mode": "split"}, "prefill member decode member"),
        ({**TWO, "mode": "colocated", "compute": 4}, "compute member compute member"),
        ({**TWO, "prefill": 4}, "prefill member prefill member decode member store"),
        ({"tensor_parallel_size": 3, "prefill": 3}, "prefill member member decode member member store"),
        ({**TWO, "prefill_tensor_parallel_size": 1}, "prefill decode member store"),
        ({"prefill_tensor_parallel_size": 2}, "prefill member decode store"),
        ({"prefill_tensor_parallel_size": 3, "decode_tensor_parallel_size": 2, "decode": 4, "store": 2},
         "prefill member member decode member decode member store store"),
        ({"decode_tensor_parallel_size": 2, "prefill": 2, "pipeline_parallel_size": 2},
         "prefill stage decode member store"),
        (DEALT, "prefill decode member store"),
        ({**DEALT, "mode": "split", "decode": 4}, "prefill decode member decode member"),
        ({**DEALT, "prefill_tensor_parallel_size": 2}, "prefill member decode member store"),
        ({**DEALT, "prefill": 2, "pipeline_parallel_size": 2}, "prefill stage decode member store"),
    ],
)  # fmt: skip
def test_the_members_of_an_instance_follow_its_first_rank(given: dict[str, Any], roles: str) -> None:
    config = ServeConfig(**given)
    assert config.roles == ["steward", *roles.split()]
    assert config.ranks == len(config.roles)
    assert config.has_followers
    for rank, role in enumerate(config.roles):
        ranks = instance_of(config.roles, rank)
        first = config.role_of(ranks[0])
        assert rank in ranks
        assert first not in ("member", "stage")
        assert leading_roles(config.roles)[rank] == first
        if role != "stage" and not (first == "prefill" and config.pipeline_parallel_size > 1):
            assert len(ranks) == members_of(config, first)
    assert config_from(config.to_dict(), "test") == config
    written = "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    assert config_from(tomllib.loads(written), "test") == config


def test_a_role_has_its_own_size_or_that_of_all() -> None:
    config = ServeConfig(tensor_parallel_size=3, prefill_tensor_parallel_size=2)
    sizes = {role: tensor_size(config, role) for role in ("prefill", "decode", "compute", "store", "member")}
    assert sizes == {"prefill": 2, "decode": 3, "compute": 3, "store": 1, "member": 1}
    config = ServeConfig(decode_context_parallel_size=4, prefill_tensor_parallel_size=2)
    assert [members_of(config, role) for role in ("prefill", "decode", "store", "member")] == [2, 4, 1, 1]
    assert [context_size(config, role) for role in ("prefill", "decode", "compute")] == [1, 4, 1]


def test_a_rank_is_told_the_sizes_of_all_instances() -> None:
    sizes = {"tensor_parallel_size": 3, "prefill_tensor_parallel_size": 2, "decode_tensor_parallel_size": 1}
    config = ServeConfig(**sizes, decode=2, decode_context_parallel_size=2, pool_bytes=2**30)
    flags = rank_flags(config)
    for name, size in (sizes | DEALT).items():
        at = flags.index("--" + name.replace("_", "-"))
        assert flags[at + 1] == str(size)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: at least 1 is needed"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size=0: at least 1 is needed"),
        ({"prefill_tensor_parallel_size": -1},
         "prefill_tensor_parallel_size=-1: give a number, or 0 for that of tensor_parallel_size"),
        ({"decode_tensor_parallel_size": -2},
         "decode_tensor_parallel_size=-2: give a number, or 0 for that of tensor_parallel_size"),
        ({**TWO, "prefill": 3}, "tensor_parallel_size=2 does not divide prefill=3: use 1 or 3"),
        ({**TWO, "decode": 3}, "tensor_parallel_size=2 does not divide decode=3: use 1 or 3"),
        ({"mode": "colocated", "compute": 4, "tensor_parallel_size": 3},
         "tensor_parallel_size=3 does not divide compute=4: use 1 or 2 or 4"),
        ({"decode_tensor_parallel_size": 4, "decode": 6},
         "decode_tensor_parallel_size=4 does not divide decode=6: use 1 or 2 or 3 or 6"),
        ({"prefill_tensor_parallel_size": 2, "mode": "colocated"},
         "prefill_tensor_parallel_size=2: mode=colocated has no prefill ranks; use tensor_parallel_size=2"),
        ({"decode_tensor_parallel_size": 2, "mode": "colocated"},
         "decode_tensor_parallel_size=2: mode=colocated has no decode ranks; use tensor_parallel_size=2"),
        ({**TWO, "prefill": 4, "pipeline_parallel_size": 2},
         "tensor_parallel_size=2 and pipeline_parallel_size=2: ranks share layers, or parts of each; "
         "leave one of them out"),
        ({"prefill_tensor_parallel_size": 2, "prefill": 4, "pipeline_parallel_size": 2},
         "prefill_tensor_parallel_size=2 and pipeline_parallel_size=2: ranks share layers, or parts of each; "
         "leave one of them out"),
        ({**TWO, "layerwise": "on"}, "tensor_parallel_size=2 moves whole blocks; use layerwise=auto"),
        ({"prefill_tensor_parallel_size": 2, "layerwise": "on"},
         "prefill_tensor_parallel_size=2 moves whole blocks; use layerwise=auto"),
        ({**DEALT, "decode": 3}, "decode_context_parallel_size=2 does not divide decode=3: use 1 or 3"),
        ({**DEALT, "mode": "colocated"},
         "decode_context_parallel_size=2: its ranks compute no prompts; use --mode pooled or split"),
        ({**DEALT, **TWO}, "decode_context_parallel_size=2 and tensor parallel decode ranks (2): "
         "ranks share tokens, or heads; leave one of them out"),
        ({**DEALT, "decode_tensor_parallel_size": 3},
         "decode_context_parallel_size=2 and tensor parallel decode ranks (3): "
         "ranks share tokens, or heads; leave one of them out"),
        ({**DEALT, "device": "cuda"}, "decode_context_parallel_size=2 needs device cpu, not cuda"),
    ],
)  # fmt: skip
def test_an_instance_that_cannot_be_is_refused_with_the_fix_in_one_line(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**given)
    assert str(caught.value) == words


def test_a_size_that_cannot_be_ends_the_command_with_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--prefill", "3", "--tensor-parallel-size", "2"]) == 2
    said = capsys.readouterr().err
    assert said.strip().endswith("tensor_parallel_size=2 does not divide prefill=3: use 1 or 3")
    assert said.count("\n") == 1


# ------------------------------------------------------------------------------- what they need of a model


def test_an_instance_has_no_more_members_than_the_model_has_kv_heads() -> None:
    for given in ({"tensor_parallel_size": 3}, {"decode_tensor_parallel_size": 3}):
        with pytest.raises(ModelError) as caught:
            context_length(ServeConfig(**given), MODEL)
        wanted = "tensor parallel size 3: the model has 2 key/value heads; use at most so many"
        assert str(caught.value) == wanted
        assert context_length(ServeConfig(**given), NINE) == NINE.max_position
    dealt = ServeConfig(decode_context_parallel_size=4)
    assert context_length(dealt, MODEL) == MODEL.max_position, "its members have all heads"


def test_contexts_of_layers_with_windows_are_not_dealt_out() -> None:
    model = replace(MODEL, windows=(None, 128))
    with pytest.raises(ConfigError) as caught:
        context_length(ServeConfig(**DEALT), model)
    assert str(caught.value) == (
        "decode_context_parallel_size=2: layers of this model look at their newest tokens alone, which are "
        "few; leave it out"
    )
    assert context_length(ServeConfig(**TWO), model) == model.max_position


def test_each_role_holds_one_request_of_the_longest_length_in_its_own_pages() -> None:
    """Of three KV heads, the largest of two members has two: it holds half as many tokens again."""
    page = page_nbytes(ServeConfig(), NINE)
    both = {"kv_cache_bytes": 44 * page}
    assert context_length(ServeConfig(**both, **TWO), NINE) == 1024
    wide, narrow = {"tensor_parallel_size": 3}, {"decode_tensor_parallel_size": 1}
    for given, message in [
        ({**both}, f"kv_cache_bytes={44 * page} holds 704 tokens, max_model_len is 1024; raise "
         f"kv_cache_bytes to {64 * page} or lower max_model_len"),
        ({"kv_cache_bytes": 22 * page, **wide, **narrow}, f"kv_cache_bytes={22 * page} holds 352 tokens, "
         f"max_model_len is 1024; raise kv_cache_bytes to {64 * page} or lower max_model_len"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            context_length(ServeConfig(**given), NINE)  # type: ignore[arg-type]
        assert str(caught.value) == message
    assert context_length(ServeConfig(kv_cache_bytes=22 * page, **wide), NINE) == 1024  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "holds"), [(20, 512 + 4 * 16), (16, 512), (15, 240), (31, 512 + 240), (32, 1024)]
)
def test_members_hold_the_tokens_of_whole_rows_and_of_one_unit_beside_them(pages: int, holds: int) -> None:
    """The prefill ranks are a pipeline with twice as many tokens, so that the decode ranks are the limit."""
    given = {"kv_cache_bytes": pages * PAGE, "prefill": 2, "pipeline_parallel_size": 2} | DEALT
    config = ServeConfig(**given, max_model_len=holds)
    most = min(holds, 2 * pages * 16)
    assert context_length(replace(config, max_model_len=most), MODEL) == most
    if holds < 2 * pages * 16 and holds < 1024:
        with pytest.raises(ConfigError) as caught:
            context_length(replace(config, max_model_len=holds + 1), MODEL)
        assert str(caught.value) == (
            f"kv_cache_bytes={pages * PAGE} holds {holds} tokens, max_model_len is {holds + 1}; raise "
            f"kv_cache_bytes to {(pages + 1) * PAGE} or lower max_model_len"
        )


def test_members_of_dealt_contexts_have_the_pages_of_the_whole_model_and_those_of_heads_more() -> None:
    config = ServeConfig(kv_cache_bytes=2**22)
    whole = num_pages(config, NINE)
    assert [num_pages(config, NINE, share) for share in shares_of(NINE, turns=4)] == [whole] * 4
    half, third = (num_pages(config, NINE, shares_of(NINE, members=size)[-1]) for size in (2, 3))
    assert (half, third) == (2**22 // (page_nbytes(config, NINE) * 2 // 3), whole * 3 + 1)


def test_a_role_has_the_shares_of_its_own_size() -> None:
    config = ServeConfig(tensor_parallel_size=3, decode_tensor_parallel_size=2)
    kv_heads = {role: [len(one.kv_heads) for one in shares_of_role(config, NINE, role)]
                for role in ("prefill", "decode", "store")}  # fmt: skip
    assert kv_heads == {"prefill": [1, 1, 1], "decode": [2, 1], "store": [3]}
    dealt = shares_of_role(ServeConfig(**DEALT), NINE, "decode")
    assert [(one.turn, one.turns, len(one.kv_heads)) for one in dealt] == [(0, 2, 3), (1, 2, 3)]
    assert len(shares_of_role(ServeConfig(**DEALT), NINE, "prefill")) == 1


@pytest.mark.parametrize(("block", "unit"), [(16, 256), (64, 256), (256, 256), (512, 512)])
def test_a_unit_is_whole_pieces_of_attention_and_whole_blocks(block: int, unit: int) -> None:
    assert unit_tokens(ServeConfig(block_size=block)) == unit


# ------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("given", [TWO, {"tensor_parallel_size": 3}, DEALT])
def test_the_segment_of_a_first_rank_ends_with_the_memory_of_the_exchange(
    given: dict[str, Any], codec: Any
) -> None:
    block = block_layout(ServeConfig(kv_codec=codec), NINE).nbytes
    config = ServeConfig(**given, lend_bytes=3 * block, staging_bytes=21 * block, kv_codec=codec)
    alone = ServeConfig(lend_bytes=3 * block, staging_bytes=21 * block, kv_codec=codec)
    count = max(given.values())
    nbytes = SharedExchange.nbytes(count, EXCHANGE_PIECE_BYTES)
    for role in ("prefill", "decode"):
        more = nbytes if members_of(config, role) > 1 else 0
        assert exchange_bytes(config, role) == more
        assert segment_bytes(config, NINE, role) == segment_bytes(alone, NINE, role) + more
    assert (exchange_bytes(config, "member"), exchange_bytes(config, "store")) == (0, 0)
    assert segment_bytes(config, NINE, "store") == segment_bytes(alone, NINE, "store")
    kinds = set()
    for number, share in enumerate(shares_of_role(config, NINE, "decode")):
        role = "member" if number else "decode"
        segment = np.zeros(segment_bytes(config, NINE, role), np.uint8)
        memory = RankMemory(config, NINE, role, share, segment)
        memory.staging[:] = 1
        exchange = segment[len(segment) - exchange_bytes(config, role) :]
        assert exchange.max(initial=0) == 0, "staging and exchange overlap"
        if not number:
            assert (segment.nbytes - exchange.nbytes) % 8 == 0
            pieces = SharedExchange(exchange, 0, count)._pieces
            assert pieces == (EXCHANGE_PIECE_BYTES, EXCHANGE_PIECE_BYTES)
        assert segment[: pool_bytes(config, NINE, role)].max(initial=0) == 0
        assert memory.slots.size == 0
        assert memory.layout == block_layout(config, share.part_of(NINE))
        shape = memory.layout.shape
        engine: Any = type("Sizes", (), {"block_shape": shape, "block_dtype": np.float32})
        if codec != "none":
            engine.block_dtype = np.uint8
        blocks = StagingBlocks(memory.staging, memory.layout, engine)
        kinds.add((blocks.half_blocks, blocks.num_slots))
    assert len(kinds) == 1, "halves and slots have numbers that all members know"


@pytest.mark.parametrize("cores", [2, 4, 8, 40])
def test_a_member_has_the_threads_of_a_rank_of_its_role(cores: int) -> None:
    config = ServeConfig(**TWO, prefill=2, decode=2)
    alone = replace(config, tensor_parallel_size=1)
    for role in ("prefill", "decode"):
        assert threads_for(config, cores, role) == threads_for(alone, cores, role)
        assert threads_for(replace(config, threads=3), cores, role) == 3
    assert threads_for(config, cores, "store") == 1


# ------------------------------------------------------------------------------- the planner


def test_prefill_ranks_with_members_move_whole_blocks_and_others_by_layers() -> None:
    assert limits_of(ServeConfig(**TWO), NINE, prefills=True).layers == 0
    assert limits_of(ServeConfig(decode_tensor_parallel_size=2), NINE, prefills=True).layers == NINE.layers
    assert limits_of(ServeConfig(**DEALT), NINE, prefills=True).layers == NINE.layers
    assert not limits_of(ServeConfig(**TWO), NINE, prefills=True).late


def test_only_ranks_that_decode_dealt_contexts_have_pages_in_rows_and_neither_prefixes_nor_drafts() -> None:
    def state(duties: set[str], **given: Any) -> Any:
        hello = RankHello(1, "decode", 0)
        return computing_rank(hello, ServeConfig(**given), MODEL, duties, 40, Staging(2, 2)).state

    dealt = state({"decode"}, **DEALT, block_size=512)
    assert isinstance(dealt.pages, DealtPages)
    assert (dealt.pages.num_pages, dealt.pages.unit_tokens, dealt.pages.turns) == (40, 512, 2)
    assert dealt.new_drafter is None
    others = [state({"prefill"}, **DEALT), state({"decode"}, **TWO), state({"decode"})]
    for other in others:
        assert type(other.pages) is Pages
        assert other.new_drafter is not None
        assert type(other.prefix) is not type(dealt.prefix)


def test_decode_ranks_load_whole_blocks_so_their_members_do_not_mind_layers() -> None:
    ServeConfig(decode_tensor_parallel_size=2, layerwise="on")
    ServeConfig(decode_context_parallel_size=2, layerwise="on")
