"""What a cluster is made of: one frozen dataclass, filled from flags and a TOML file.

Made by `cli.py`, read by every role; never mutated. It knows nothing of processes or models.
Every problem is found here or in `launch/preflight.py`, before anything is started.
"""

from __future__ import annotations

import math
import re
import typing
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

from mooncake_lite.config.instances import FOLLOWERS, check_instances, ranks_of_instance
from mooncake_lite.config.kv_events import kv_events_config
from mooncake_lite.config.modes import BY_MODE, ROLES, mode_of, refuse_without_pool, role_counts
from mooncake_lite.config.origins import LOOPBACK, parse_hosts, parse_origins
from mooncake_lite.config.scheduling_options import check_scheduling
from mooncake_lite.config.service_classes import Tenant, parse_classes, parse_tenants
from mooncake_lite.errors import ConfigError
from scheduler.admission import DEFAULT as ADMISSION
from scheduler.classes import ServiceClass
from scheduler.instance import Preemption
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

_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_num_seqs", 1, math.inf, "at least 1 is needed"),
    ("max_queue", 1, math.inf, "at least 1 is needed"),
    ("max_num_batched_tokens", 1, math.inf, "at least 1 is needed"),
    ("max_num_partial_prefills", 1, math.inf, "at least 1 is needed"),
    ("tensor_parallel_size", 1, math.inf, "at least 1 is needed"),
    ("decode_context_parallel_size", 1, math.inf, "at least 1 is needed"),
    ("prefill_tensor_parallel_size", 0, math.inf, "give a number, or 0 for that of tensor_parallel_size"),
    ("decode_tensor_parallel_size", 0, math.inf, "give a number, or 0 for that of tensor_parallel_size"),
    ("threads", 0, math.inf, "give a number, or 0 for one that fits the machine"),
    ("port", 1, 65_536, "a port is from 1 to 65535"),
    ("max_model_len", 0, math.inf, "give a length, or 0 for the model's own"),
    ("copy_cold_s", 0, math.inf, "give a number of seconds, 0 or more"),
    ("dead_after_s", 2, math.inf, "give a number of seconds, 2 or more"),
    ("wait_for_rank_s", 0, math.inf, "give a number of seconds, 0 or more"),
    ("start_timeout_s", 5, math.inf, "give a number of seconds, 5 or more"),
)
"""Name, least value, and what all values are below; then what to write."""


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


def check_speculate(speculate: str, engine: str = "real") -> None:
    """Raises ConfigError for drafts that this engine cannot have."""
    if speculate == "off" or (engine == "real" and speculate == "prompt-lookup"):
        return
    if engine == "real":
        raise ConfigError(f"speculate={speculate!r}: use off or prompt-lookup")
    if not 0 < acceptance_of(speculate) <= 1:
        raise ConfigError(
            f"speculate={speculate!r}: emulated tokens repeat nothing; give the part of drafts that shall be "
            "accepted, as 0.6, or off"
        )


def acceptance_of(speculate: str) -> float:
    """Return the part of drafts that the emulated engine shall accept; 0 for what is no number."""
    try:
        return float(speculate)
    except ValueError:
        return 0.0


def check_batch_invariant(batch_invariant: bool, dtype: str, device: str) -> None:
    """Raises ConfigError when there are no batch-invariant kernels for this dtype on this device."""
    if batch_invariant and (dtype, device) != ("float32", "cpu"):
        raise ConfigError(f"batch_invariant needs dtype float32 and device cpu, not {dtype} and {device}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Everything `mooncake-lite serve` can be told. Field names are the flags' names.

    Each field has a paragraph here, which is also the help of its flag.

    served_model_name: Id of the model in the API. By default the name of its folder.
    dtype: Data type of weights and KV cache. On CPUs bfloat16 is correct but not faster.
    device: Device of the ranks that compute: cpu or cuda.
    engine: real: computes. emulated: sleeps for as long as the profile says and invents tokens, so that many
        ranks run on one machine.
    profile: File with measured times, written by `mooncake-lite profile`, or the name of a profile that comes
        with the package. The conductor predicts by it; the emulated engine sleeps by it. By default the
        package's profile of this model; with a real engine, only on the CPU that it was measured on.
    weights: Form in which weights are read. published: the default model's 4- and 8-bit GGUF blocks; float32:
        the tensors made of them; auto: blocks in decode and float32 in prefill, each where it is faster.
    host: Address of the HTTP server.
    port: Port of the HTTP server.
    api_key: Key that clients must send. Prefer the variable MOONCAKE_LITE_API_KEY: other users can read
        flags.
    allowed_origins: Origins of web pages that may call the server, separated by commas, as
        https://app.example:8443. loopback: pages that this machine serves, at any port; *: all pages.
    allowed_hosts: Host names by which clients may call the server, separated by commas, as llm.example. IP
        addresses, localhost and the machine's own name are always allowed. By default a server on loopback
        refuses other names, and any other server takes all names.
    mode: How ranks share the work. pooled: KV goes from prefill to decode ranks through a pool of store
        ranks. split: it goes straight to the decode rank, without a pool. colocated: each compute rank does
        both.
    prefill: Number of ranks that compute prompts, 1 by default. None in mode colocated.
    decode: Number of ranks that generate answers, 1 by default. None in mode colocated.
    compute: Number of ranks that do both, 2 by default. In mode colocated only.
    store: Number of ranks that lend DRAM to the KVCache pool and keep the HDF5 tier. By default 1 in mode
        pooled and 0 in mode colocated. None in mode split.
    mpi_profile: How ranks exchange bytes. ft: Open MPI's own layer; when a rank dies, the others go on
        without it. fast: UCX, for RDMA fabrics; when a rank dies, MPI ends the job at once.
    hosts: Hosts and their slots for mpirun, as a:2,b:2.
    control_host: Address at which other hosts reach the conductor.
    mpi_arg: Additional arguments for mpirun, as '--mca NAME VALUE'. May be repeated.
    pool_bytes: DRAM that each store rank lends to the pool, in /dev/shm, as 512MiB.
    lend_bytes: DRAM that each rank that computes lends to the pool, by default none. In mode split: DRAM of
        each decode rank for KV on its way to it, by default 512MiB.
    ssd_dir: Folder of the HDF5 tier. A later start with the same folder reuses its blocks. By default there
        is no tier.
    ssd_bytes: Capacity of the tier of each store rank.
    block_size: Tokens per block of the pool; must divide 512.
    kv_codec: Encoding of blocks in the pool and on SSD. int8 takes a quarter of the space of float32.
    eviction: Policy that evicts blocks from the pool's DRAM: lru, lfu, arc, s3fifo, ... [+second-hit].
    copy_cold_s: Seconds without a read after which the copy of a hot block is evicted first.
    kv_cache_bytes: Memory for the KV pages of each rank that computes.
    staging_bytes: Shared memory through which each rank that computes moves KV.
    max_model_len: Longest prompt and answer together, in tokens. 0 takes the model's own limit.
    max_num_seqs: Sequences that one rank decodes at once.
    max_num_batched_tokens: Tokens that a rank computes in one forward pass. Prompts get what the running
        sequences leave.
    max_num_partial_prefills: Prompts that one rank computes at once. They share each forward pass.
    enable_chunked_prefill: Cut long prompts into chunks. Without, each is computed in one pass, and decoding
        waits for it.
    overlap_transfers: Store the blocks of a prompt while its next chunk, or the next prompt, is computed, and
        load them on the decode rank meanwhile. Without, a rank computes no prompt while it stores.
    pipeline_parallel_size: Prefill ranks that compute a prompt together: each holds some of the layers, and
        they work on successive chunks at once. Must divide --prefill.
    tensor_parallel_size: Ranks that compute each layer together, on shares of its heads: an instance. Must
        divide the numbers of ranks that compute.
    prefill_tensor_parallel_size: The same of prefill ranks alone. 0: as --tensor-parallel-size says.
    decode_tensor_parallel_size: The same of decode ranks alone. 0: as --tensor-parallel-size says.
    decode_context_parallel_size: Decode ranks that hold the KV of each sequence together, for contexts that
        are too long for one. Must divide --decode.
    layerwise: Move KV by layers beside a prompt's pass: its prefix comes in ahead, its last blocks leave
        behind it. auto: where the costs say that it is faster; on: everything; off: only blocks move.
    max_queue: Requests that may wait. Further ones are refused with 429.
    policy: Where a request is prefilled and decoded: kvcache-centric (the paper's Algorithm 1), global-cache,
        topology, local-cache, least-loaded, two-choices, round-robin, random or dynamo.
    balancing_threshold: A rank fetches a prefix that is more than this many times longer than the one near
        it, and hot blocks are copied likewise: the paper's kvcache_balancing_threshold, at least 1, for
        --policy kvcache-centric.
    admission: Which requests are refused: none, bounded-queue, after-prefill, early-rejection, predictive or
        shed. The last four go by limits on latency; after-prefill needs prefill ranks.
    racks: Rack of each node as numbers, as 0,0,1,1, for --policy topology. Nodes are in the order of their
        first ranks. By default every node is a rack of its own.
    queue: Which waiting request begins first: fcfs, srpt, aged-srpt, deadline, fair or predicted.
    queue_ageing: Seconds of prefill that a second of waiting is worth, for --queue aged-srpt.
    trust: Part of the decode slots that go to the shortest predicted answer, 0 to 1, for --queue predicted.
        The others go first come, first served.
    slo_ttft_ms: Limit on the time to first token in milliseconds, for requests and classes without one.
    slo_tpot_ms: Limit on the time between tokens in milliseconds, likewise.
    enable_prefix_caching: Reuse the KV of prefixes that were computed before.
    prefix_sharing: How a rank finds prefixes in its own pages. hash: whole blocks, by their keys; radix:
        pages, by their tokens; off: it always takes them from the pool.
    preemption: What happens to a sequence when a rank has no free page. recompute: its KV is computed again
        later; swap: its KV waits in the pool.
    kv_events_config: Publish the blocks that the pool stores and removes. JSON in vLLM's format.
    classes: Service classes in JSON, as {"interactive": {"weight": 4, "cache_share": 0.5, "slo_ttft_ms": 500,
        "slo_tpot_ms": 50}}, the highest first. In a TOML file: [classes.NAME]. By default interactive,
        standard and batch, which protect nothing.
    tenants: Clients with API keys of their own in JSON, as {"alice": {"key": "...", "class": "batch"}}. In a
        TOML file: [tenants.NAME]. Prefer the variable MOONCAKE_LITE_TENANTS.
    record: Write every event of the control plane to a new file, for `mooncake-lite replay-events`. The file
        contains keys, lengths, digests and names of tenants and sessions, and no text of prompts and answers.
    speculate: Drafts for sequences that decode, checked several at a time; answers stay the same.
        prompt-lookup: what followed in the text when its last tokens stood there before; off: none, but for
        requests that ask. With engine=emulated the part of drafts that shall be accepted, as 0.6.
    batch_invariant: Compute each sequence to the same bits whatever shares its step. Decoding is slower.
    trace: Write steps, transfers and waits of all ranks to a new file, which Perfetto opens. The file is made
        when the cluster ends. It contains request ids, lengths and times, and no text.
    threads: Threads of each rank that computes. 0 chooses by cores and ranks (see doctor).
    dead_after_s: Seconds of silence after which a suspended rank, a host out of reach or the conductor
        counts as dead. A rank on rank 0's host that runs but does not answer has three times as long.
    verify: Which blocks are compared with their checksums when they are read. ssd: those from SSD; dram:
        also those from DRAM, so that a flipped bit is a miss. A new conductor begins with dram.
    wait_for_rank_s: Seconds that requests wait when no rank is left that can prefill, decode or store. They
        are refused then.
    start_timeout_s: Longest start, in seconds.
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
    allowed_hosts: str = ""
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
    overlap_transfers: bool = True
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    prefill_tensor_parallel_size: int = 0
    decode_tensor_parallel_size: int = 0
    decode_context_parallel_size: int = 1
    layerwise: Literal["auto", "on", "off"] = "auto"
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
    speculate: str = "off"
    batch_invariant: bool = False
    trace: str = ""
    threads: int = 0
    dead_after_s: float = 6.0
    verify: Literal["ssd", "dram"] = "ssd"
    wait_for_rank_s: float = 30.0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self._check_choices()
        for name, least, end, wanted in _RANGES:
            if not least <= getattr(self, name) < end:
                raise ConfigError(f"{name}={getattr(self, name)}: {wanted}")
        self._apply_mode()
        check_instances(self)
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
        check_device_name(self.device)
        kv_events_config(self.kv_events_config)
        parse_tenants(self.tenants, self.service_classes, self.api_key)
        parse_origins(self.allowed_origins)
        parse_hosts(self.allowed_hosts)
        check_weight_choice(self.weights, self.dtype, self.device)
        check_batch_invariant(self.batch_invariant, self.dtype, self.device)
        check_engine(self)
        check_speculate(self.speculate, self.engine)

    def _check_choices(self) -> None:
        """Raise ConfigError for a value that is none of its field's Literal."""
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                wanted = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"{name}={getattr(self, name)!r}: use {wanted}")

    def _apply_mode(self) -> None:
        """Fill in the numbers of the mode. Raises ConfigError for options that contradict it."""
        given = {role: getattr(self, role) for role in ROLES}
        sizes = {role: len(ranks_of_instance(self, role)) for role in ROLES}
        for role, count in role_counts(self.mode, given, sizes).items():
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
        """Role of each MPI rank: rank 0's, then those of ROLES in their order, instances one by one."""
        instances = [(ranks_of_instance(self, role), getattr(self, role)) for role in ROLES]
        return ["steward", *(one for ranks, n in instances for one in ranks * (n // len(ranks)))]

    @property
    def has_followers(self) -> bool:
        """Whether there is an instance of several ranks."""
        return any(role in FOLLOWERS for role in self.roles)

    def role_of(self, rank: int) -> str:
        """Role of an MPI rank."""
        return self.roles[rank]

    def ranks_of(self, role: str) -> list[int]:
        """All ranks that play a role, ascending."""
        return [rank for rank in range(self.ranks) if self.role_of(rank) == role]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as TOML or JSON can hold them."""
        return asdict(self)


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return {field: its choices} of those fields of ServeConfig that are a Literal."""
    hints = typing.get_type_hints(ServeConfig)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}
