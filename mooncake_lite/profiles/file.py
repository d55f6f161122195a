"""The profile file: JSON with the model, the machine, the date, and what was measured, in sections.

Written by `mooncake-lite profile`, read before launch and by every emulated rank. A section that this version
does not know is kept as it is. Drawn in docs/explain/emulation.md.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from mooncake_lite.config.files import replace_file
from mooncake_lite.config.instances import MEMBER
from mooncake_lite.config.machine import machine, now
from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import ITEMSIZE, ModelConfig
from mooncake_lite.profiles.compute import ComputeCost, PassLoad
from mooncake_lite.profiles.fit import FitError, MeasuredPass, MeasuredPrompt
from scheduler.costs import PrefillCost

VERSION = 1

SHIPPED = "shipped"
"""Folder of the profiles that come with the package: MODEL.json, and MODEL-MACHINE.json of other machines."""

PAPER_MACHINES = "LLaMA3-70B-8xA800"
"""The shipped profile of the paper's machines."""


class ProfiledModel(msgspec.Struct, frozen=True):
    """The model that was measured. fingerprint: see model_fingerprint.

    kv   its layers, KV heads, head_dim and bytes of a number; [] in profiles of earlier versions
    """

    name: str
    fingerprint: str
    kv: list[int] = []

    def __post_init__(self) -> None:
        if self.kv and (len(self.kv) != 4 or min(self.kv) < 1):
            raise ValueError(f"kv={self.kv}: layers, KV heads, head_dim and bytes of a number are wanted")


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


class PrefillSection(msgspec.Struct, frozen=True):
    """Whole prompts with cached prefixes, computed in chunks as a rank does. Times as in `compute`.

    chunk_tokens   tokens of one pass; 0: of all together
    prompts        what was measured
    """

    chunk_tokens: int
    fit: PrefillCost
    error: FitError
    prompts: list[MeasuredPrompt]


class MovesSection(msgspec.Struct, frozen=True):
    """Rates of copying KV. None: not measured.

    near_bytes_per_s   one rank reads from another one of its node; near_latency_s: of 4 KiB
    far_bytes_per_s    the same between nodes
    dram_bytes_per_s   from a segment of the node into pages of the engine
    ssd_bytes_per_s    from the SSD tier into memory, verified
    """

    near_bytes_per_s: float | None = None
    near_latency_s: float | None = None
    far_bytes_per_s: float | None = None
    dram_bytes_per_s: float | None = None
    ssd_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = (getattr(self, name) for name in self.__struct_fields__)
        if not all(rate is None or rate > 0 for rate in rates):
            raise ValueError("rates and near_latency_s must be above 0")


MOST_OVERHEAD_S = 60.0


class OverheadsSection(msgspec.Struct, frozen=True):
    """What serving takes besides forward passes and moves of KV: the part that is this program.

    step_s      a rank, from the end of a pass to the begin of the next one
    message_s   a control message, from one process to another one's answer to it
    request_s   a request in the gateway, from the client and back to it

    Without this section they are guessed: what the default model's ranks take on a small machine.
    """

    step_s: float = 0.0004
    message_s: float = 0.001
    request_s: float = 0.004

    def __post_init__(self) -> None:
        if (
            not 0
            < min(msgspec.structs.astuple(self))
            <= max(msgspec.structs.astuple(self))
            <= MOST_OVERHEAD_S
        ):
            raise ValueError(f"every overhead must be above 0, and at most {MOST_OVERHEAD_S:g} s")


class ExchangeSection(msgspec.Struct, frozen=True):
    """What ranks that compute a pass together exchange, and how long that takes.

    latency_s     of an exchange; bytes_per_s: at which each of them gets what the others have put
    row_bytes     of a sum: hidden states of a token
    piece_bytes   of a gather: what a piece of a context is to a token's attention, of one layer
    """

    latency_s: float
    bytes_per_s: float
    row_bytes: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if not min(msgspec.structs.astuple(self)) > 0:
            raise ValueError("all of an exchange must be above 0")

    def seconds(self, nbytes: int, members: int) -> float:
        """Return the seconds of an exchange in which each member puts so many bytes."""
        return self.latency_s + (members - 1) * nbytes / self.bytes_per_s


Section = TypeVar("Section", PrefillSection, MovesSection, OverheadsSection, ExchangeSection)


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

    @property
    def prefill(self) -> PrefillSection | None:
        """Return the section about whole prompts, if there is one."""
        return self._section("prefill", PrefillSection)

    @property
    def moves(self) -> MovesSection | None:
        """Return the section about moving KV, if there is one."""
        return self._section("moves", MovesSection)

    @property
    def overheads(self) -> OverheadsSection | None:
        """Return the section about what serving takes besides, if there is one."""
        return self._section("overheads", OverheadsSection)

    @property
    def exchange(self) -> ExchangeSection:
        """Return the section about exchanges. Raises ConfigError when there is none."""
        if (found := self._section("exchange", ExchangeSection)) is None:
            raise ConfigError(
                f"the profile of {self.model.name} does not say what an exchange between ranks takes, which "
                "instances of several need; measure it anew with `mooncake-lite profile`"
            )
        return found

    def _section(self, name: str, kind: type[Section]) -> Section | None:
        raw = self.sections.get(name)
        return None if raw is None else msgspec.json.decode(raw, type=kind)

    def with_section(self, name: str, section: msgspec.Struct) -> Profile:
        """Return a copy with a section added or replaced."""
        raw = msgspec.Raw(msgspec.json.encode(section))
        return msgspec.structs.replace(self, sections={**self.sections, name: raw})


def new_profile(name: str, sizes: ModelConfig, dtype: str, sections: dict[str, msgspec.Raw]) -> Profile:
    """Return a profile of a model on this machine, with these sections, made now."""
    kv = [sizes.layers, sizes.kv_heads, sizes.head_dim, ITEMSIZE[dtype]]
    model = ProfiledModel(name, model_fingerprint(sizes), kv)
    return Profile(VERSION, model, machine(), now(), sections)


def model_fingerprint(model: ModelConfig) -> str:
    """Return a fingerprint of the sizes that decide how long a pass takes.

    Weights are no part of it: models of one shape take the same time.
    """
    sizes = (model.vocab_size, model.max_position)
    return xxhash.xxh3_128_hexdigest(f"{model.kv_identity()} {sizes}".encode())


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile file; a reader never sees half of it. Raises OSError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


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
        raw = plain_text(raw)
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
        _ = profile.compute, profile.prefill, profile.moves, profile.overheads
        _ = "exchange" in profile.sections and profile.exchange
        return profile
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"profile={source!r} is no profile ({error}); make one with `mooncake-lite profile`"
        ) from None


class _Version(msgspec.Struct):
    version: int


def shipped_profile(folder: Path) -> bytes | None:
    """Return the profile that the package has under this folder's name, or None."""
    found = resources.files("mooncake_lite.profiles") / SHIPPED / f"{folder.name}.json"
    return found.read_bytes() if found.is_file() else None


def named_profile(path: str) -> Profile:
    """Read a profile by its path or, if there is no such file, by its name in SHIPPED. See read_profile."""
    if Path(path).exists() or Path(path).name != path:
        return read_profile(Path(path))
    if (raw := shipped_profile(Path(path))) is not None:
        return parse_profile(raw, f"{path} (shipped)")
    folder = resources.files("mooncake_lite.profiles") / SHIPPED
    names = ", ".join(sorted(found.name.removesuffix(".json") for found in folder.iterdir()))
    raise ConfigError(f"profile={path!r} is neither a file nor a profile of this package; those are {names}")


def profile_of(config: ServeConfig, folder: Path, model: ModelConfig) -> Profile:
    """Return the profile of a configuration with an emulated engine, or with --profile.

    folder   of the model

    Without --profile it is the one that the package has for this model. Raises ConfigError, with the fix,
    when there is none, or it was measured with another model, dtype or (with a real engine) device or CPU.
    """
    path = config.profile
    wanted: dict[str, str] = {"dtype": config.dtype}
    if config.engine == "real":
        wanted["device"] = config.device
    if path:
        profile = named_profile(path)
    elif (raw := shipped_profile(folder)) is not None:
        profile = parse_profile(raw, f"{folder.name}.json (shipped)")
    else:
        raise ConfigError(f"no profile of {folder.name} comes with this program; {_fix(folder, wanted)}")
    told = f"profile={path!r}" if path else "the shipped profile"
    if profile.model.fingerprint != model_fingerprint(model):
        raise ConfigError(
            f"{told} was measured with {profile.model.name}, and this is another model: {folder.name}; "
            f"serve {profile.model.name}, or {_fix(folder, wanted)}"
        )
    for name, value in wanted.items():
        used = getattr(profile.compute.engine, name)
        if used != value:
            raise ConfigError(f"{told} was measured with {name} {used}, not {value}; {_fix(folder, wanted)}")
    _check_machine(config, profile, told, _fix(folder, wanted))
    if config.engine == "emulated" and MEMBER in config.roles:
        _ = profile.exchange
    return profile


def _check_machine(config: ServeConfig, profile: Profile, told: str, fix: str) -> None:
    """Raise ConfigError when a real engine would be predicted by what another machine takes."""
    measured, here = profile.machine.get("cpu"), machine()["cpu"]
    if config.engine == "real" and measured != here:
        raise ConfigError(
            f"{told} was measured on {measured or 'another machine'}, and this is {here}; {fix}"
        )


def _fix(folder: Path, wanted: dict[str, str]) -> str:
    usual = {"dtype": "float32", "device": "cpu"}
    flags = "".join(f" --{name} {value}" for name, value in wanted.items() if value != usual[name])
    return (
        f"measure one with `mooncake-lite profile {folder}{flags} --out FILE` and give it as --profile FILE"
    )
