"""The profile file: JSON with the model, the machine, the date, and sections. `compute` is the first section.

Written by `mooncake-lite profile`, read before launch and by every emulated rank. A section that this version
does not know is kept as it is. Drawn in docs/explain/emulation.md.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.profiles.compute import ComputeCost, PassLoad
from mooncake_lite.profiles.fit import FitError, MeasuredPass

VERSION = 1

SHIPPED = "shipped"
"""Folder of the profiles that come with the package, one per model: NAME.json."""


class ProfiledModel(msgspec.Struct, frozen=True):
    """The model that was measured. fingerprint: see model_fingerprint."""

    name: str
    fingerprint: str


class EngineUsed(msgspec.Struct, frozen=True):
    """How the engine computed when it was measured. threads: of the one process that did."""

    dtype: str
    device: str
    weights: str
    threads: int


class ComputeSection(msgspec.Struct, frozen=True):
    """Forward passes.

    time_scale   factor on all seconds of the fit: 0.5 is a machine twice as fast
    error        of the fit, by kind of pass
    passes       what was measured
    """

    engine: EngineUsed
    fit: ComputeCost
    error: dict[str, FitError]
    passes: list[MeasuredPass]
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.time_scale > 0:
            raise ValueError(f"time_scale={self.time_scale:g} must be above 0")

    def seconds(self, load: PassLoad) -> float:
        """Return the seconds that a pass takes."""
        return self.fit.seconds(load) * self.time_scale


class Profile(msgspec.Struct, frozen=True):
    """A whole file.

    date       of the last change, ISO 8601
    sections   by name, each as raw JSON until it is asked for
    """

    version: int
    model: ProfiledModel
    machine: dict[str, Any]
    date: str
    sections: dict[str, msgspec.Raw]

    @property
    def compute(self) -> ComputeSection:
        """Return the section about forward passes. `read_profile` has checked it."""
        return msgspec.json.decode(self.sections["compute"], type=ComputeSection)

    def with_section(self, name: str, section: msgspec.Struct) -> Profile:
        """Return a copy with a section added or replaced."""
        raw = msgspec.Raw(msgspec.json.encode(section))
        return msgspec.structs.replace(self, sections={**self.sections, name: raw})


def model_fingerprint(model: ModelConfig) -> str:
    """Return a fingerprint of the sizes that decide how long a pass takes.

    Weights are no part of it: models of one shape take the same time.
    """
    sizes = (model.vocab_size, model.max_position)
    return xxhash.xxh3_128_hexdigest(f"{model.kv_identity()} {sizes}".encode())


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile file; a reader never sees half of it. Raises OSError."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def read_profile(path: Path) -> Profile:
    """Read and check a profile file.

    Raises ConfigError when it is missing, malformed, of another version, or has no section `compute`.
    """
    try:
        return parse_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"profile={str(path)!r} cannot be read: {error.strerror}") from None


def parse_profile(raw: bytes, source: str) -> Profile:
    """Parse a profile. source: named in errors. Raises ConfigError; see read_profile."""
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version != VERSION:
            raise ConfigError(
                f"profile={source!r} has version {version}, this program reads version {VERSION}; "
                "measure it anew with `mooncake-lite profile`"
            )
        profile = msgspec.json.decode(raw, type=Profile)
        if "compute" not in profile.sections:
            raise ConfigError(
                f"profile={source!r} has no section compute; measure it with `mooncake-lite profile`"
            )
        _ = profile.compute
        return profile
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"profile={source!r} is no profile ({error}); make one with `mooncake-lite profile`"
        ) from None


class _Version(msgspec.Struct):
    version: int


def shipped_profile(folder: Path) -> bytes | None:
    """Return the profile that the package has for a model of this folder's name, or None."""
    found = resources.files("mooncake_lite.profiles") / SHIPPED / f"{folder.name}.json"
    return found.read_bytes() if found.is_file() else None


def profile_for(path: str, folder: Path, model: ModelConfig, dtype: str) -> Profile:
    """Return the profile with which a model is emulated.

    path     of the file; "" takes the one that the package has for this model
    folder   of the model; dtype: of its KV

    Raises ConfigError, with the fix, when there is none, or it was measured with another model or dtype.
    """
    if path:
        profile = read_profile(Path(path))
    elif (raw := shipped_profile(folder)) is not None:
        profile = parse_profile(raw, f"{folder.name}.json (shipped)")
    else:
        raise ConfigError(f"no profile of {folder.name} comes with this program; {_fix(folder, dtype)}")
    told = f"profile={path!r}" if path else "the shipped profile"
    if profile.model.fingerprint != model_fingerprint(model):
        raise ConfigError(
            f"{told} was measured with {profile.model.name}, and this is another model: {folder.name}; "
            f"serve {profile.model.name}, or {_fix(folder, dtype)}"
        )
    used = profile.compute.engine.dtype
    if used != dtype:
        raise ConfigError(f"{told} was measured with dtype {used}, not {dtype}; {_fix(folder, dtype)}")
    return profile


def _fix(folder: Path, dtype: str) -> str:
    flags = "" if dtype == "float32" else f" --dtype {dtype}"
    return (
        f"measure one with `mooncake-lite profile {folder}{flags} --out FILE` and give it as --profile FILE"
    )
