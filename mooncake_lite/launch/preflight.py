"""Everything that can be refused before a process is started, each with its fix.

Called by the launcher, and by rank 0 under a user's own mpirun. It reads the model's sizes, the
machine's figures and the files' state, and changes nothing. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.config import PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ConfigError, LaunchError
from mooncake_lite.launch.machine import Machine, find_mpirun
from mooncake_lite.launch.mpirun import parse_hosts
from mooncake_lite.launch.open_mpi import inspect_open_mpi

RANK_BYTES = 256 * 2**20
"""Memory of a rank beside weights, pages and segments: torch, Numba and their compiled code (120 MB of
it private where this was measured, activations on top)."""

MPI_SHARED_BYTES = 20 * 2**20
"""Open MPI's own shared-memory file of one rank, beside the window."""

SCRATCH_BLOCKS = 6
"""Blocks a compute rank's segment holds at least, whatever staging_bytes says (see roles/kv_mover.py)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What the checks need to know about a model.

    max_position         longest context that the model was made for, in tokens
    kv_bytes_per_token   over all layers, in the configured dtype
    weights_bytes        of its files; mapped once and shared by the ranks of a node
    """

    name: str
    max_position: int
    kv_bytes_per_token: int
    weights_bytes: int


def model_sizes(config: ServeConfig) -> ModelSizes:
    """Resolve the model (the default one is pulled when it is missing) and read its sizes.

    Raises ModelError or CacheError.
    """
    from mooncake_lite.model import load_config, resolve_model

    folder = resolve_model(config.model)
    model = load_config(folder)
    return ModelSizes(
        name=folder.name,
        max_position=model.max_position,
        kv_bytes_per_token=model.kv_bytes_per_token(config.dtype),
        weights_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )


def preflight(
    config: ServeConfig, *, sizes: ModelSizes | None = None, machine: Machine | None = None
) -> list[str]:
    """Refuse what cannot work on this machine; return notes worth a line.

    Raises ConfigError, LaunchError, ModelError or CacheError with the fix in the message. Cheap checks
    come first: a wrong port is told before a model is pulled.
    """
    check_platform()
    check_hosts(config)
    check_device(config)
    check_profile(config)
    check_port(config)
    if config.ssd_dir:
        check_tier_folder(Path(config.ssd_dir))
    machine = machine or Machine.here()
    sizes = sizes or model_sizes(config)
    check_lengths(config, sizes)
    roles = roles_here(config)
    check_shared_memory(config, sizes, machine, roles)
    check_memory(config, sizes, machine, roles)
    return notes(config)


def notes(config: ServeConfig) -> list[str]:
    """What a user may want to know, though it is no error."""
    if config.host not in LOOPBACK and not config.api_key:
        return [
            f"everybody who can reach {config.host} may use this server; "
            "set MOONCAKE_LITE_API_KEY to ask for a key"
        ]
    return []


def check_platform() -> None:
    """Ranks need Linux: /dev/shm, /proc, process death signals."""
    if sys.platform != "linux":
        raise LaunchError(
            f"serve needs Linux, this is {sys.platform}; `mooncake-lite generate` and the tests without "
            "MPI work here, see `mooncake-lite doctor`"
        )


def check_hosts(config: ServeConfig) -> None:
    """--hosts must be readable and must have a slot for somebody."""
    hosts = parse_hosts(config.hosts)
    if hosts and sum(slots for _, slots in hosts) < config.ranks:
        raise ConfigError(
            f"hosts={config.hosts!r} has {sum(slots for _, slots in hosts)} slots for {config.ranks} ranks; "
            "write HOST:SLOTS with more slots"
        )


def check_device(config: ServeConfig) -> None:
    """A CUDA device needs NVIDIA's driver."""
    if config.device != "cpu" and not Path("/dev/nvidiactl").exists():
        raise LaunchError(f"device={config.device!r}: no NVIDIA driver is loaded here; use --device cpu")


def check_profile(config: ServeConfig) -> None:
    """The Open MPI that is there must be able to do what the profile asks for."""
    if refusal := inspect_open_mpi(find_mpirun()).refusal(config.profile):
        raise LaunchError(f"profile={config.profile!r}: {refusal}")


def check_port(config: ServeConfig) -> None:
    """The HTTP port must be free on the address asked for."""
    fix = "choose another with --port"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise LaunchError(
            f"host={config.host!r} is no address of this machine; use 127.0.0.1 or 0.0.0.0"
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(f"port {config.port} on {config.host} is taken; {fix}") from None
            if error.errno == errno.EACCES:
                raise LaunchError(f"port {config.port} is reserved for root; {fix}") from None
            raise LaunchError(
                f"host={config.host!r} cannot be listened on ({error.strerror}); use 127.0.0.1 or 0.0.0.0"
            ) from None


def check_tier_folder(folder: Path) -> None:
    """The tier's folder can be made and written, and no other cluster uses it."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise LaunchError(f"ssd_dir={str(folder)!r}: {nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK) or os.statvfs(nearest).f_flag & os.ST_RDONLY:
        raise LaunchError(
            f"ssd_dir={str(folder)!r}: {nearest} is not writable; choose another with --ssd-dir"
        )
    for lock in sorted(folder.glob("store-*/lock")):
        if _locked_by_another(lock):
            raise LaunchError(
                f"ssd_dir={str(folder)!r} is in use by another cluster ({lock} is locked); "
                "stop it, or choose another folder with --ssd-dir"
            )


def _locked_by_another(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def check_lengths(config: ServeConfig, sizes: ModelSizes) -> None:
    """The longest request must fit: in the model, in one engine's pages, in the pool."""
    length = config.max_model_len or sizes.max_position
    if length > sizes.max_position:
        raise ConfigError(
            f"max_model_len={length}: {sizes.name} was made for at most {sizes.max_position} tokens"
        )
    if length < 2:
        raise ConfigError(f"max_model_len={length} has no room for a prompt and an answer; at least 2")
    page_bytes = PAGE_TOKENS * sizes.kv_bytes_per_token
    pages = -(-length // PAGE_TOKENS) + 1  # one more to write into while the last is full
    if config.kv_cache_bytes < pages * page_bytes:
        holds = max(0, config.kv_cache_bytes // page_bytes - 1) * PAGE_TOKENS
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} holds {holds} tokens, max_model_len is {length}; "
            f"raise it to at least {pages * page_bytes}{_or_shorten(holds)}"
        )
    block_bytes = config.block_size * sizes.kv_bytes_per_token
    blocks = -(-length // config.block_size) + 1  # and the tail
    holds_blocks = config.store * (config.pool_bytes // block_bytes)
    if holds_blocks < blocks:
        needed = -(-blocks // config.store) * block_bytes
        raise ConfigError(
            f"pool_bytes={config.pool_bytes} holds {holds_blocks} blocks of {block_bytes} B, a request of "
            f"max_model_len={length} tokens needs {blocks}; raise it to at least {needed}"
            f"{_or_shorten((holds_blocks - 1) * config.block_size)}"
        )


def _or_shorten(tokens: int) -> str:
    return f", or lower --max-model-len to {tokens}" if tokens >= 2 else ""


def roles_here(config: ServeConfig) -> list[str]:
    """Roles of the ranks that mpirun puts on this host: by slots, in the order of --hosts."""
    roles = [config.role_of(rank) for rank in range(config.ranks)]
    hosts = parse_hosts(config.hosts)
    if not hosts:
        return roles
    mine, first = [], 0
    names = {socket.gethostname(), socket.gethostname().split(".")[0], *LOOPBACK}
    for name, slots in hosts:
        if name in names:
            mine += roles[first : first + slots]
        first += slots
    return mine


def segment_bytes(config: ServeConfig, sizes: ModelSizes, role: str) -> int:
    """Bytes of one rank's shared window: the pool of a store rank, the staging of a compute rank."""
    if role == "store":
        return config.pool_bytes
    if role == "conductor":
        return 0
    return max(config.staging_bytes, SCRATCH_BLOCKS * config.block_size * sizes.kv_bytes_per_token)


def check_shared_memory(config: ServeConfig, sizes: ModelSizes, machine: Machine, roles: list[str]) -> None:
    """Windows lie in /dev/shm: one too small makes MPI hang or kills ranks with SIGBUS later."""
    if any("backing_directory" in argument for argument in config.mpi_arg):
        return
    if machine.shared_memory_bytes < 0:
        raise LaunchError("there is no /dev/shm here; mount one: mount -t tmpfs tmpfs /dev/shm")
    needed = sum(segment_bytes(config, sizes, role) + MPI_SHARED_BYTES for role in roles)
    if needed > machine.shared_memory_bytes:
        size = -(-needed >> 20)
        raise LaunchError(
            f"/dev/shm has {_mib(machine.shared_memory_bytes)} free, {_mib(needed)} are needed (pools and "
            f"staging); lower --pool-bytes, enlarge it (mount -o remount,size={size}m /dev/shm, or "
            f"docker run --shm-size={size}m), or use a folder: --mpi-arg '--mca osc_sm_backing_directory DIR'"
        )


def check_memory(config: ServeConfig, sizes: ModelSizes, machine: Machine, roles: list[str]) -> None:
    """Weights once, and every rank's pages, segment and runtime."""
    per_role: dict[str, Callable[[], int]] = {
        "conductor": lambda: 0,
        "store": lambda: segment_bytes(config, sizes, "store"),
        "prefill": lambda: config.kv_cache_bytes + segment_bytes(config, sizes, "prefill"),
        "decode": lambda: config.kv_cache_bytes + segment_bytes(config, sizes, "decode"),
    }
    needed = sizes.weights_bytes + sum(RANK_BYTES + per_role[role]() for role in roles)
    if needed > machine.memory_bytes:
        raise LaunchError(
            f"{_mib(machine.memory_bytes)} of memory are available, {_mib(needed)} are needed (weights, "
            "pages, pools, runtime); lower --kv-cache-bytes or --pool-bytes, or use fewer ranks"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
