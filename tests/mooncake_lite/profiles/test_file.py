"""Profile files: kept whole, checked when they are read, and refused for another model with the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_lite.config.serve import DEFAULT_MODEL, ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.file import (
    Profile,
    parse_profile,
    profile_of,
    read_profile,
    shipped_profile,
    write_profile,
)
from tests import emulation

pytestmark = pytest.mark.quick

LOAD = PassLoad(100, 5050, 3, 900)


def changed(path: Path, change: dict[str, Any], *under: str) -> Path:
    """Update an object of the JSON in a file."""
    data = json.loads(path.read_text())
    inner = data
    for name in under:
        inner = inner[name]
    inner.update(change)
    path.write_text(json.dumps(data))
    return path


def found(folder: Path, profile: str = "", **wishes: Any) -> Profile:
    """The profile with which a model is emulated."""
    config = ServeConfig(model=str(folder), profile=profile, **{"engine": "emulated", **wishes})
    return profile_of(config, folder, load_config(folder))


def test_a_file_is_read_as_it_was_written_and_keeps_sections_that_are_unknown(tmp_path: Path) -> None:
    path = emulation.profile_file(emulation.model_folder(tmp_path / "model"))
    changed(path, {"transfer": {"bytes_per_s": [1, 2]}}, "sections")
    profile = read_profile(path)
    assert profile.compute.seconds(LOAD) == emulation.COST.seconds(LOAD)
    write_profile(path, profile.with_section("compute", profile.compute))
    again = json.loads(path.read_text())
    assert again["sections"]["transfer"] == {"bytes_per_s": [1, 2]}
    assert again["version"] == 1


def test_a_time_scale_is_a_factor_on_all_seconds(tmp_path: Path) -> None:
    path = emulation.profile_file(emulation.model_folder(tmp_path / "model"))
    changed(path, {"time_scale": 0.25}, "sections", "compute")
    assert read_profile(path).compute.seconds(LOAD) == 0.25 * emulation.COST.seconds(LOAD)


@pytest.mark.parametrize(
    ("change", "under", "says"),
    [
        ({"version": 2}, (), "has version 2, this program reads version 1; measure it anew"),
        ({"sections": {}}, (), "has no section compute; measure it with"),
        ({"model": 3}, (), r"is no profile \(.*model"),
        ({"time_scale": 0}, ("sections", "compute"), r"is no profile \(time_scale=0 must be above 0"),
        ({"base_s": -1.0}, ("sections", "compute", "fit", "decode"), "must be 0 or more"),
        ({"fit": 1}, ("sections", "compute"), "is no profile"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(
    change: dict[str, Any], under: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    path = changed(emulation.profile_file(emulation.model_folder(tmp_path / "model")), change, *under)
    with pytest.raises(ConfigError, match=says) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_one_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_profile(tmp_path / "none")
    with pytest.raises(ConfigError, match="is no profile"):
        parse_profile(b"\0not json", "x")


def test_a_profile_of_another_model_is_refused_with_the_fix(tmp_path: Path) -> None:
    measured = emulation.model_folder(tmp_path / "measured")
    served = emulation.model_folder(tmp_path / "served", emulation.SMOL)
    path = emulation.profile_file(measured)
    assert found(measured, str(path)).model.name == "measured"
    with pytest.raises(ConfigError) as caught:
        found(served, str(path))
    assert str(caught.value) == (
        f"profile={str(path)!r} was measured with measured, and this is another model: served; serve "
        f"measured, or measure one with `mooncake-lite profile {served} --out FILE` and give it as --profile "
        "FILE"
    )


def test_a_profile_of_another_dtype_is_refused_with_the_fix(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"dtype float32, not bfloat16; .* --dtype bfloat16 --out FILE"):
        found(folder, str(emulation.profile_file(folder)), dtype="bfloat16")


def test_equal_shapes_may_share_a_profile_and_a_model_without_one_is_told(tmp_path: Path) -> None:
    folder, twin = (emulation.model_folder(tmp_path / name) for name in ("one", "two"))
    path = str(emulation.profile_file(folder))
    assert found(twin, path).model.name == "one"
    with pytest.raises(ConfigError, match="no profile of two comes with this program; measure one"):
        found(twin)


def test_the_default_model_has_a_profile() -> None:
    raw = shipped_profile(Path(DEFAULT_MODEL))
    assert raw is not None
    profile = parse_profile(raw, "shipped")
    compute = profile.compute
    kinds = {one.kind for one in compute.passes}
    assert kinds == set(compute.error) == {"prefill", "decode", "mixed"}
    assert compute.seconds(PassLoad(256, 32896)) > compute.seconds(PassLoad(16, 136)) > 0
    assert compute.seconds(PassLoad(0, 0, 16, 16384)) > compute.seconds(PassLoad(0, 0, 1, 64)) > 0
    assert msgspec.json.decode(msgspec.json.encode(profile)) == msgspec.json.decode(raw)
