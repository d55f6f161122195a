"""What a cluster is made of: one frozen dataclass, filled from flags and a TOML file.

Made by `cli.py`, read by every role; never mutated. It knows nothing of processes or models.
Every problem is found here or in `launch/preflight.py`, before anything is started.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import typing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mooncake_lite.errors import ConfigError
from mooncake_lite.kv_events import kv_events_config
from mooncake_lite.modes import BY_MODE, ROLES, mode_of, refuse_without_pool, role_counts
from mooncake_lite.origins import LOOPBACK, parse_origins
from mooncake_lite.scheduling_options import check_scheduling
from mooncake_lite.service_classes import TABLES, Tenant, parse_classes, parse_tenants
from scheduler.admission import DEFAULT as ADMISSION
from scheduler.classes import ServiceClass
from scheduler.instance import SHARING, Preemption
from scheduler.placement import THRESHOLD
from scheduler.queues import AGEING, TRUST
from store.errors import UnknownPolicy
from store.policies import policy_factory

PAGE_TOKENS = 16
"""Tokens of one engine page. 16 is vLLM's default: smaller wastes fewer tail slots, larger means
fewer table entries. A pool block is a whole number of pages."""

MOST_RANKS = 65_536
"""Far more than any job of ours has had: a number beyond it is a slip of the finger."""

MPIProfile = Literal["ft", "fast"]

KVCodec = Literal["none", "bfloat16", "int8", "int4", "fp8"]
"""The names of kernels_numba.codecs.CODECS, known here without loading them."""

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")

_AT_LEAST_ONE = (
    "max_num_seqs", "max_queue", "max_num_batched_tokens",
    "max_num_partial_prefills",
)  # fmt: skip

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Bytes of "512MiB", "1 GB", "4096" or 4096.

    Raises ConfigError when the number or the unit is not understood, or the size is negative.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = str(text), ""
    else:
        stripped = str(text).strip()
        number = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = stripped[len(number) :].strip().upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{name}={text!r} is not a size; write bytes or 512MiB, 2GB, ...") from None
    if size < 0:
        raise ConfigError(f"{name}={text!r} is negative")
    return size


def check_device_name(device: str) -> None:
    """Raises ConfigError when `device` names no kind of device that a model can be on."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device={device!r}: use cpu or cuda")


def check_weight_choice(weights: str, dtype: str, device: str) -> None:
    """Raises ConfigError for a choice of weights that there is not, or not with this dtype on this device."""
    if weights not in ("auto", "published", "float32"):
        raise ConfigError(f"weights={weights!r}: use auto, published or float32")
    if weights == "published" and (dtype, device) != ("float32", "cpu"):
        raise ConfigError(
            f"weights=published needs dtype float32 and device cpu, not {dtype} and {device}; "
            "use weights=auto"
        )
    if weights == "float32" and dtype != "float32":
        raise ConfigError(f"weights=float32 contradicts dtype={dtype}; use weights=auto")


_REAL_ONLY = (
    ("device", "cpu"), ("weights", "auto"), ("threads", 0), ("kv_codec", "none"), ("batch_invariant", False),
)  # fmt: skip
"""Settings of the real engine alone, and their defaults."""


def check_engine(config: ServeConfig) -> None:
    """Raises ConfigError for settings that belong to the other engine."""
    if config.engine not in ("real", "emulated"):
        raise ConfigError(f"engine={config.engine!r}: use real or emulated")
    if config.profile in typing.get_args(MPIProfile):
        raise ConfigError(
            f"profile={config.profile!r} is no file; to choose how ranks exchange bytes, use mpi_profile"
        )
    if config.engine == "real":
        return
    for name, default in _REAL_ONLY:
        if getattr(config, name) != default:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} has no meaning with engine=emulated; leave it out"
            )


def check_batch_invariant(batch_invariant: bool, dtype: str, device: str) -> None:
    """Raises ConfigError when there are no batch-invariant kernels for this dtype on this device."""
    if batch_invariant and (dtype, device) != ("float32", "cpu"):
        raise ConfigError(f"batch_invariant needs dtype float32 and device cpu, not {dtype} and {device}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Everything `mooncake-lite serve` can be told. Field names are the flags' names.

    allowed_origins     origins of web pages that may read answers: a list with commas, "loopback", or "*"
    engine              real: computes; emulated: waits for as long as the profile says, and invents tokens
    profile             file with times (profiles/file.py), or the name of a shipped one: what the emulated
                        engine takes, and what the conductor expects; "": the shipped one of this model
    weights             auto: published blocks for a few tokens and float32 tensors for many, where a folder
                        has both; published: the GGUF's blocks alone; float32: tensors alone
    mode                which roles there are and how KV travels, by the names of modes.py
    prefill, decode, compute, store   ranks of each role; BY_MODE: the mode's own number
    pool_bytes          DRAM of one store rank's segment
    lend_bytes          DRAM of each rank whose role lends some in this mode; BY_MODE: the mode's own number
    ssd_dir, ssd_bytes  folder and capacity of the HDF5 tier of one store rank; no tier when ssd_dir is ""
    block_size          tokens of one pool block
    kv_codec            how blocks are encoded in the pool and on SSD; a lossy one has keys of its own
    eviction            policy that chooses what leaves the pool's DRAM, by the names of store.policies
    copy_cold_s         a copy of a hot block that was not read for so long is the first to leave
    kv_cache_bytes      KV pages of one prefill or decode rank's engine
    max_num_seqs        sequences one decode rank runs at once
    max_num_batched_tokens   tokens that a rank computes in one forward pass; prompts get what decode leaves
    max_num_partial_prefills   prompts that a rank computes at once
    enable_chunked_prefill   prompts are cut to fit into that; otherwise each is computed in one pass
    kv_events_config    JSON, as vLLM's flag: who may hear what the pool stores and removes (kv_events.py)
    classes             JSON: service classes by name, the highest first (service_classes.py)
    tenants             JSON: clients by name, with their API keys and classes; secret
    preemption          what becomes of the KV of a sequence for which there is no page: it is computed again,
                        or the pool keeps it
    prefix_sharing      how a rank finds a prefix in its own pages: whole blocks by key, or pages by token ids
    policy              where a request is prefilled and decoded: a name of scheduler.placement.POLICIES
    balancing_threshold how many times longer than the near prefix the longest one must be to be fetched: the
                        paper's kvcache_balancing_threshold, for policy kvcache-centric
    admission           which requests are refused: a name of scheduler.admission.ADMISSIONS
    racks               rack of each node, as "0,0,1"; "": every node is a rack of its own
    queue               which waiting request begins first: a name of scheduler.queues.QUEUES
    queue_ageing        seconds of prefill that a second of waiting is worth, for queue aged-srpt
    trust               part of the decode slots that go by predicted length, 0 to 1, for queue predicted
    slo_ttft_ms         limit on the time to first token, for classes and requests without one; 0: none
    slo_tpot_ms         likewise, on the time between tokens
    max_queue           requests that may wait; one more is refused with 429
    batch_invariant     the bits of a sequence do not depend on what else is computed; slower
    record              file that every event of the control plane is written to (recording.py); "": none
    trace               file that the run's steps, transfers and waits are written to (tracing/); "": none
    """

    model: str = DEFAULT_MODEL
    served_model_name: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    engine: Literal["real", "emulated"] = "real"
    profile: str = ""
    weights: Literal["auto", "published", "float32"] = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    allowed_origins: str = LOOPBACK
    mode: Literal["pooled", "split", "colocated"] = "pooled"
    prefill: int = BY_MODE
    decode: int = BY_MODE
    compute: int = BY_MODE
    store: int = BY_MODE
    mpi_profile: MPIProfile = "ft"
    hosts: str = ""
    control_host: str = ""
    mpi_arg: tuple[str, ...] = ()
    pool_bytes: int = 512 * 2**20
    lend_bytes: int = BY_MODE
    ssd_dir: str = ""
    ssd_bytes: int = 4 * 2**30
    block_size: int = 64
    kv_codec: KVCodec = "none"
    eviction: str = "lru"
    copy_cold_s: float = 60.0
    kv_cache_bytes: int = 512 * 2**20
    staging_bytes: int = 64 * 2**20
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_num_partial_prefills: int = 1
    enable_chunked_prefill: bool = True
    max_queue: int = 64
    policy: str = "kvcache-centric"
    balancing_threshold: float = THRESHOLD
    admission: str = ADMISSION
    racks: str = ""
    queue: str = "fcfs"
    queue_ageing: float = AGEING
    trust: float = TRUST
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    enable_prefix_caching: bool = True
    prefix_sharing: Literal["hash", "radix", "off"] = "hash"
    preemption: Preemption = "recompute"
    kv_events_config: str = ""
    classes: str = ""
    tenants: str = ""
    record: str = ""
    batch_invariant: bool = False
    trace: str = ""
    threads: int = 0
    dead_after_s: float = 6.0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self._apply_mode()
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.ranks > MOST_RANKS:
            raise ConfigError(
                f"the conductor and all others are {self.ranks:,} ranks; at most {MOST_RANKS:,}"
            )
        if self.block_size < PAGE_TOKENS or 512 % self.block_size or self.block_size % PAGE_TOKENS:
            raise ConfigError(
                f"block_size={self.block_size}: it must divide 512 and be a multiple of {PAGE_TOKENS}"
            )
        check_scheduling(asdict(self), parse_classes(self.classes))
        try:
            policy_factory(self.eviction)
        except UnknownPolicy as error:
            raise ConfigError(f"eviction: {error}") from None
        for name in ("copy_cold_s", "dead_after_s", "start_timeout_s"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)}: give a number of seconds")
        if self.threads < 0:
            raise ConfigError(f"threads={self.threads}: give a number, or 0 for one that fits the machine")
        if self.copy_cold_s < 0:
            raise ConfigError(f"copy_cold_s={self.copy_cold_s}: give seconds, 0 or more")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: a port is from 1 to 65535")
        if self.max_model_len < 0:
            raise ConfigError(f"max_model_len={self.max_model_len}: give a length, or 0 for the model's own")
        if self.mpi_profile not in typing.get_args(MPIProfile):
            raise ConfigError(f"mpi_profile={self.mpi_profile!r}: use ft or fast")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r}: use float32 or bfloat16")
        check_device_name(self.device)
        if self.preemption not in get_args(Preemption):
            raise ConfigError(f"preemption={self.preemption!r}: use {' or '.join(get_args(Preemption))}")
        if self.prefix_sharing not in SHARING:
            raise ConfigError(f"prefix_sharing={self.prefix_sharing!r}: use one of {', '.join(SHARING)}")
        kv_events_config(self.kv_events_config)
        parse_tenants(self.tenants, self.service_classes, self.api_key)
        parse_origins(self.allowed_origins)
        if self.kv_codec not in typing.get_args(KVCodec):
            raise ConfigError(f"kv_codec={self.kv_codec!r}: use one of {', '.join(typing.get_args(KVCodec))}")
        check_weight_choice(self.weights, self.dtype, self.device)
        check_batch_invariant(self.batch_invariant, self.dtype, self.device)
        check_engine(self)
        if self.dead_after_s < 2 or self.start_timeout_s < 5:
            raise ConfigError("dead_after_s must be at least 2, start_timeout_s at least 5")

    def _apply_mode(self) -> None:
        """Fill in the numbers of the mode. Raises ConfigError for options that contradict it."""
        for role, count in role_counts(self.mode, {role: getattr(self, role) for role in ROLES}).items():
            object.__setattr__(self, role, count)
        if self.lend_bytes == BY_MODE:
            object.__setattr__(self, "lend_bytes", mode_of(self.mode).lend_bytes)
        if not self.has_pool:
            defaults = {field.name: field.default for field in fields(self)} | {"lend_bytes": 0}
            values = {name: getattr(self, name) for name in defaults}
            refuse_without_pool(self.mode, {n: v for n, v in values.items() if v != defaults[n]})

    @property
    def service_classes(self) -> list[ServiceClass]:
        """Service classes, the highest first. Those without limits have the limits of all requests."""
        limits = [each / 1e3 or math.inf for each in (self.slo_ttft_ms, self.slo_tpot_ms)]
        return [one.with_limits(*limits) for one in parse_classes(self.classes)]

    @property
    def known_tenants(self) -> list[Tenant]:
        """Clients with API keys of their own."""
        return parse_tenants(self.tenants, self.service_classes, self.api_key)

    @property
    def has_pool(self) -> bool:
        """Whether there is a KVCache pool: store ranks."""
        return self.store > 0

    @property
    def ranks(self) -> int:
        """MPI ranks of the cluster: the conductor and all others."""
        return 1 + sum(getattr(self, role) for role in ROLES)

    @property
    def roles(self) -> list[str]:
        """Role of each MPI rank: the conductor's, then those of ROLES in their order."""
        return ["conductor", *(role for role in ROLES for _ in range(getattr(self, role)))]

    def role_of(self, rank: int) -> str:
        """Role of an MPI rank."""
        return self.roles[rank]

    def ranks_of(self, role: str) -> list[int]:
        """All ranks that play a role, ascending."""
        return [rank for rank in range(self.ranks) if self.role_of(rank) == role]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as TOML or JSON can hold them."""
        return asdict(self)


_SIZES = ("pool_bytes", "lend_bytes", "ssd_bytes", "kv_cache_bytes", "staging_bytes")


def config_from(values: dict[str, Any], source: str) -> ServeConfig:
    """A ServeConfig from plain values; `source` is named in errors.

    Raises ConfigError for an unknown key, a wrong type or a value out of range.
    """
    known = {field.name: field for field in fields(ServeConfig)}
    checked: dict[str, Any] = {}
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: {_unknown(raw, value, sorted(known))}")
        default = known[name].default
        if name in _SIZES:
            value = parse_bytes(value, name)
        elif name in TABLES and isinstance(value, dict):
            value = json.dumps(value, default=str)
        elif name == "mpi_arg":
            if not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
                raise ConfigError(f"{source}: mpi_arg must be a list of strings, not {value!r}")
            value = tuple(value)
        elif isinstance(default, float) and type(value) is int:
            value = float(value)
        elif type(value) is not type(default):
            wanted = type(default).__name__
            raise ConfigError(f"{source}: {name}={value!r} must be of type {wanted}")
        elif name in ROLES and value == BY_MODE:
            raise ConfigError(f"{source}: {name}={value}: give a number of ranks, or leave it out")
        checked[name] = value
    return ServeConfig(**checked)


def _shown(name: str, value: Any) -> str:
    return f"table [{name}]" if isinstance(value, dict) else f"key {name!r}"


def _unknown(name: str, value: Any, known: list[str]) -> str:
    if isinstance(value, dict):
        near = difflib.get_close_matches(name, TABLES, n=1)
        hint = (
            f"did you mean [{near[0]}.NAME]?" if near else "write the keys without a table, or under [serve]"
        )
        return f"unknown {_shown(name, value)}; {hint}"
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"unknown {_shown(name, value)}; " + (
        f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a configuration file: all of them flat, or all but the tables of TABLES under [serve].

    Raises ConfigError when the file is missing, is not TOML, or has keys in both places.
    """
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    if "serve" not in data:
        return data
    table = data.pop("serve")
    if not isinstance(table, dict):
        raise ConfigError(f"config file {path}: serve={table!r} must be a table; write [serve]")
    table |= {name: data.pop(name) for name in TABLES if name in data and name not in table}
    if data:
        outside = ", ".join(_shown(name, value) for name, value in data.items())
        raise ConfigError(
            f"config file {path}: {outside} beside the table [serve] would be ignored; "
            "write all keys in this table"
        )
    return table
