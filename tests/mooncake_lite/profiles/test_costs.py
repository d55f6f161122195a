"""The costs of a cluster from a profile, and the paper's machines, which ship as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles import costs as profile_costs
from mooncake_lite.profiles import file as profile_file
from mooncake_lite.profiles.compute import CHUNK_TOKENS, ComputeCost, PassTerms
from mooncake_lite.profiles.costs import costs_of, serving_costs
from mooncake_lite.profiles.file import (
    SHIPPED,
    MovesSection,
    PrefillSection,
    Profile,
    named_profile,
    profile_of,
    read_profile,
    write_profile,
)
from mooncake_lite.profiles.fit import FitError, MeasuredPrompt, error_of, fit_prompts
from mooncake_lite.tools.profile.exchanges import measure_exchange
from scheduler.costs import CostConfig, PrefillCost
from tests import emulation

pytestmark = pytest.mark.quick

A800 = "LLaMA3-70B-8xA800"


def test_a_fit_of_whole_prompts_finds_the_terms_again() -> None:
    cost = PrefillCost(0.05, 1e-3, 2e-7, 3e-5)
    prompts = [
        MeasuredPrompt(n, int(n * share), cost.seconds(n, int(n * share)))
        for n in (64, 256, 1024, 4096)
        for share in (0.0, 0.5, 0.95)
    ]
    found = fit_prompts(prompts)
    assert found.seconds(3000, 2000) == pytest.approx(cost.seconds(3000, 2000))
    assert error_of(found, prompts).largest < 1e-6


# ------------------------------------------------------------------------------ from a profile


def test_every_section_gives_its_costs_scaled_and_what_is_missing_is_guessed(tmp_path: Path) -> None:
    profile = emulation.profile_of(emulation.model_folder(tmp_path / "model"))
    only_passes = costs_of(profile)
    assert not only_passes.is_guess
    assert only_passes.prefill.seconds(1024, 0) == pytest.approx(5 * 2e-3 + 1024 * 1e-5), (
        "4 chunks, rounded up"
    )
    assert (only_passes.transfer, only_passes.load) == (CostConfig().transfer, CostConfig().load)

    whole = PrefillSection(CHUNK_TOKENS, PrefillCost(0.1, 1e-3, 1e-7, 1e-5), FitError(0.0, 0.0), [])
    profile = profile.with_section("prefill", whole).with_section("moves", MovesSection(far_bytes_per_s=7e9))
    profile = profile.with_section("compute", msgspec.structs.replace(profile.compute, time_scale=0.5))
    found = costs_of(profile)
    assert found.prefill.seconds(1000, 500) == pytest.approx(0.5 * whole.fit.seconds(1000, 500))
    assert found.decode.step_s(4, 0) == pytest.approx(0.5 * (2e-3 + 4e-4))
    assert found.transfer.far_bytes_per_s == 7e9
    assert found.load == CostConfig().load


def test_a_prompt_in_chunks_pays_a_base_for_each() -> None:
    cost = profile_costs.in_chunks(ComputeCost(PassTerms(0.01, 1e-3, 1e-6), PassTerms(0.0, 0.0, 0.0)))
    assert cost.seconds(10 * CHUNK_TOKENS, 0) == pytest.approx(
        11 * 0.01 + 2.56 + 1e-6 * 2560 * 2561 / 2, rel=1e-9
    )


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("prefill", {"fit": {"base_s": -1}}),
        ("moves", {"near_bytes_per_s": 0}),
        ("exchange", {"latency_s": 1e-5, "bytes_per_s": 0, "row_bytes": 64, "piece_bytes": 64}),
    ],
)
def test_a_damaged_section_is_refused(tmp_path: Path, section: str, content: dict[str, Any]) -> None:
    path = emulation.profile_file(emulation.model_folder(tmp_path / "model"))
    data = json.loads(path.read_text())
    data["sections"][section] = content
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="is no profile"):
        read_profile(path)


def test_a_profile_without_exchanges_serves_no_members_that_are_emulated(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    path, model = emulation.profile_file(folder), load_config(folder)
    emulated = {"model": str(folder), "engine": "emulated", "profile": str(path)}
    profile_of(ServeConfig(**emulated), folder, model)
    with pytest.raises(ConfigError, match=r"what an exchange between ranks takes.*measure it anew"):
        profile_of(ServeConfig(**emulated, tensor_parallel_size=2), folder, model)
    write_profile(path, read_profile(path).with_section("exchange", measure_exchange(model)))
    found = profile_of(ServeConfig(**emulated, tensor_parallel_size=2), folder, model).exchange
    assert (found.row_bytes, found.piece_bytes) == (4 * 128, 4 * 4 * 34)


@pytest.mark.parametrize("name", [A800, "SmolLM2-135M-Instruct"])
def test_profiles_of_the_package_say_what_an_exchange_takes(name: str) -> None:
    exchange = named_profile(name).exchange
    assert 5e-6 < exchange.latency_s < 1e-4
    assert exchange.seconds(exchange.row_bytes, 2) == pytest.approx(exchange.latency_s, rel=0.1)
    assert exchange.seconds(10**9, 3) == pytest.approx(2e9 / exchange.bytes_per_s, rel=1e-3)


# ------------------------------------------------------------------------------ of a cluster


def test_a_real_engine_starts_with_its_profile_and_without_one_with_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_file, "machine", lambda: {"cpu": "none"})
    folder = emulation.model_folder(tmp_path / "model")
    path = emulation.profile_file(folder)
    model = load_config(folder)
    assert serving_costs(ServeConfig(model=str(folder)), folder, model) == CostConfig()
    given = ServeConfig(model=str(folder), profile=str(path))
    assert serving_costs(given, folder, model) == costs_of(read_profile(path))
    with pytest.raises(ConfigError, match=r"with device cpu, not cuda; measure one .* --device cuda --out"):
        serving_costs(ServeConfig(model=str(folder), profile=str(path), device="cuda"), folder, model)


def test_a_profile_of_another_machine_serves_an_emulated_engine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    given, model = {"model": str(folder), "profile": str(emulation.profile_file(folder))}, load_config(folder)
    monkeypatch.setattr(profile_file, "machine", lambda: {"cpu": "another"})
    words = (
        r"was measured on none, and this is another; measure one with `mooncake-lite profile .* --out FILE`"
    )
    with pytest.raises(ConfigError, match=words):
        profile_of(ServeConfig(**given), folder, model)
    assert profile_of(ServeConfig(engine="emulated", **given), folder, model).model.name == "model"


@pytest.mark.parametrize(("cpu", "fits"), [("none", True), ("another", False)])
def test_the_shipped_profile_serves_a_real_engine_on_its_own_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, fits: bool
) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    raw = emulation.profile_file(folder).read_bytes()
    monkeypatch.setattr(profile_file, "shipped_profile", lambda folder: raw)
    monkeypatch.setattr(profile_file, "machine", lambda: {"cpu": cpu})
    found = serving_costs(ServeConfig(model=str(folder)), folder, load_config(folder))
    assert found.is_guess is not fits


# ------------------------------------------------------------------------------ the paper's machines


def paper() -> Profile:
    return named_profile(A800)


def test_the_papers_machines_come_with_the_package_and_name_their_source() -> None:
    assert "FAST '25" in paper().machine["source"]
    assert (Path(profile_costs.__file__).parent / SHIPPED / f"{A800}.json").is_file()


@pytest.mark.parametrize(
    ("cached_share", "published", "within"),
    [
        (0.0, {8: 1.00, 16: 2.05, 32: 4.48, 64: 10.58, 128: 27.52}, 0.02),
        (0.95, {8: 0.134, 16: 0.227, 32: 0.406, 64: 0.882, 128: 2.33}, 0.05),
    ],
)
def test_prefill_takes_what_the_paper_has_measured(
    cached_share: float, published: dict[int, float], within: float
) -> None:
    """FAST'25: prefill of LLaMA3-70B on 8xA800, read from the plots. Lengths in units of 1,024 tokens."""
    cost = costs_of(paper()).prefill
    for thousands, seconds in published.items():
        tokens = 1024 * thousands
        assert cost.seconds(tokens, round(cached_share * tokens)) == pytest.approx(seconds, rel=within)


def test_decode_takes_what_the_paper_has_measured() -> None:
    """FAST'25: 128 tokens, one sequence, after 8k and 128k tokens of context."""
    cost = costs_of(paper()).decode
    for tokens, seconds in ((8192, 3.39), (131072, 3.94)):
        taken = sum(cost.step_s(1, tokens + index) for index in range(1, 129))
        assert taken == pytest.approx(seconds, rel=0.01)


def test_moving_40_gb_takes_what_46_gb_per_s_takes() -> None:
    costs = costs_of(paper())
    assert costs.transfer.seconds(40e9) == pytest.approx(40 / 46, rel=0.01)
    assert costs.load.seconds("dram", 40e9) == pytest.approx(40 / 46, rel=0.01)


def test_the_stored_fit_is_the_fit_of_its_points() -> None:
    prefill = paper().prefill
    found = fit_prompts(prefill.prompts)
    assert found.seconds(50_000, 20_000) == pytest.approx(prefill.fit.seconds(50_000, 20_000))
    assert error_of(found, prefill.prompts).largest == pytest.approx(prefill.error.largest)


LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def test_a_model_of_the_papers_shape_is_emulated_by_name_and_another_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    config = ServeConfig(model=str(folder), engine="emulated", dtype="bfloat16", profile=A800)
    assert profile_of(config, folder, load_config(folder)).model.name == "LLaMA3-70B"
    other = emulation.model_folder(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"profile='{A800}' was measured with LLaMA3-70B"):
        profile_of(config, other, load_config(other))


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=f"neither a file nor .* those are {A800}, SmolLM2-135M-Instruct"):
        named_profile("8xA800")


def test_a_profile_that_is_written_again_keeps_every_section(tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    write_profile(path, paper())
    assert costs_of(read_profile(path)) == costs_of(paper())
