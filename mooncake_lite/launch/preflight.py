"""Everything that can be refused before a process is started, each with its fix.

Called by the launcher, and by rank 0 under a user's own mpirun. It reads the model's sizes, the
machine's figures and the files' state, and leaves them as they are. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.config.instances import leading_roles, members_of, tensor_size
from mooncake_lite.config.machine import Machine, find_mpirun, why_unwritable
from mooncake_lite.config.modes import COMPUTE_ROLES, mode_of
from mooncake_lite.config.scheduling_options import parse_racks
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError, LaunchError
from mooncake_lite.launch.mpirun import parse_hosts
from mooncake_lite.launch.open_mpi import inspect_open_mpi
from mooncake_lite.launch.place import ranks_near, world_from_environment
from mooncake_lite.launch.threads import threads_for
from mooncake_lite.model.config import ModelConfig, load_config
from mooncake_lite.model.sizes import block_layout, context_length, scratch_bytes, segment_bytes
from mooncake_lite.model.weight_source import weight_source
from mooncake_lite.tracing.tracer import parts_folder
from store.ssd.tier_folder import lock_holder

RANK_BYTES = 256 * 2**20
"""Memory of a rank beside weights, pages and segments: torch, Numba and their compiled code (120 MB of
it private where this was measured, activations on top)."""

EMULATED_RANK_BYTES = 64 * 2**20
"""The same of a rank with an emulated engine: no torch, no Numba, no pages. 42 MB of it are private on
the machine where this was measured."""

MPI_SHARED_BYTES = 20 * 2**20
"""Open MPI's own shared-memory file of one rank, beside the window."""

JOB_SYSTEMS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")
"""Variables of a job whose nodes mpirun takes without --hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model's sizes.

    weights_bytes   of its files, mapped once and shared by the ranks of a node
    warnings        what is allowed and may still not be right in its folder, one line each
    """

    config: ModelConfig
    weights_bytes: int
    warnings: tuple[str, ...] = ()


def find_model(config: ServeConfig) -> FoundModel:
    """Resolve the model (the default one is pulled when it is missing) and read its folder as ranks do.

    Of the weights it reads the headers alone. Raises ModelError or CacheError; also when the folder does not
    have the weights that are asked for. Raises ConfigError when a profile is of another model, or an emulated
    engine has none; that needs no weights. Raises ModelError when members of an instance cannot share them.
    """
    from mooncake_lite.model.generation_config import default_sampling
    from mooncake_lite.model.progress import resolve_visibly
    from mooncake_lite.model.tokenizer import load_tokenizer
    from mooncake_lite.model.weights import check_weights

    folder = resolve_visibly(config.model)
    sizes = load_config(folder)
    if config.profile or config.engine == "emulated":
        from mooncake_lite.profiles.file import profile_of  # brings NumPy

        profile_of(config, folder, sizes)
    files: tuple[Path, ...] = ()
    if config.engine != "emulated":
        source = weight_source(folder, config.weights, config.dtype, config.device)
        for members in sorted({tensor_size(config, role) for role in mode_of(config.mode).ranks}):
            check_weights(source, sizes, members)
        files = source.files
    default_sampling(folder)
    unembedded = load_tokenizer(folder).unembedded()
    return FoundModel(
        config=sizes,
        weights_bytes=sum(file.stat().st_size for file in files),
        warnings=_about(folder / "tokenizer.json", unembedded, sizes),
    )


def _about(path: Path, unembedded: dict[int, str], sizes: ModelConfig) -> tuple[str, ...]:
    """Return a warning about tokens of which the model has no embedding, if there are any."""
    if not unembedded:
        return ()
    first = min(unembedded)
    return (
        f"{path}: added_tokens has {len(unembedded)} tokens that the model lacks, the first is "
        f"{unembedded[first]!r} with the id {first} (vocab_size={sizes.vocab_size} in config.json); prompts "
        "with them will be refused",
    )


def preflight(
    config: ServeConfig, *, model: FoundModel | None = None, machine: Machine | None = None
) -> list[str]:
    """Refuse what cannot work on this machine; return warnings, one line each.

    Raises ConfigError, LaunchError, ModelError or CacheError with the fix in the message. Cheap checks
    come first: a taken port is told before a model is pulled.
    """
    check_platform()
    check_hosts(config)
    check_racks(config)
    check_device(config)
    check_mpi_profile(config)
    check_port(config)
    if config.ssd_dir:
        check_tier_folder(Path(config.ssd_dir).expanduser())
    for option in ("record", "trace"):
        if path := getattr(config, option):
            check_new_file(option, Path(path).expanduser())
    machine = machine or Machine.here()
    model = model or find_model(config)
    if context_length(config, model.config) < 2:
        raise ConfigError(
            f"max_model_len={config.max_model_len} has no room for a prompt and an answer; at least 2"
        )
    check_tier_size(config, model)
    roles = roles_here(config)
    check_shared_memory(config, model, machine, roles)
    check_memory(config, model, machine, roles)
    return [*warnings(config), *crowded(config, machine.cores), *model.warnings]


def warnings(config: ServeConfig) -> list[str]:
    """What is allowed and may still not be what the user wants."""
    if config.api_key or config.tenants or _is_loopback(config.host):
        return []
    return [
        f"host={config.host}: every machine that can reach this address can use the server without a key; "
        "set MOONCAKE_LITE_API_KEY, or use --host 127.0.0.1"
    ]


def crowded(config: ServeConfig, cores: int) -> list[str]:
    """Warn of each role on this host whose ranks compute in lockstep and have to wait for cores."""
    roles, found = roles_here(config, leading_roles(config.roles)), []
    computing = sum(role in COMPUTE_ROLES for role in roles)
    for role in dict.fromkeys(roles if config.engine != "emulated" else ()):
        count, members = roles.count(role), members_of(config, role)
        threads = threads_for(config, cores, role, roles)
        if members > 1 and max(computing, count * threads) > cores:
            found.append(
                f"{computing} ranks compute on {cores} cores, {count} {role} ranks among them with "
                f"threads={threads} each, in instances of {members}: members wait for each other in every "
                "layer, so one without a core keeps all waiting; use fewer members or threads, or more hosts"
            )
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_here(host: str) -> bool:
    return host in (socket.gethostname(), socket.gethostname().split(".")[0]) or _is_loopback(host)


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


def check_racks(config: ServeConfig) -> None:
    """--racks must name a rack for each node. Nodes that are not known yet are the conductor's to check."""
    if config.racks and (nodes := _planned_nodes(config)):
        parse_racks(config.racks, nodes)


def _planned_nodes(config: ServeConfig) -> int:
    """Return how many nodes mpirun will use, as it fills hosts by slots; 0 where it may do otherwise."""
    is_told = config.mpi_arg or world_from_environment() is not None
    if is_told or any(name in os.environ for name in JOB_SYSTEMS):
        return 0
    used, left = set(), config.ranks
    for name, slots in parse_hosts(config.hosts) or [("localhost", left)]:
        if left > 0:
            used.add("" if _is_here(name) else name)
            left -= slots
    return len(used)


def check_device(config: ServeConfig) -> None:
    """A CUDA device needs NVIDIA's driver."""
    if config.device != "cpu" and not Path("/dev/nvidiactl").exists():
        raise LaunchError(f"device={config.device!r}: no NVIDIA driver is loaded here; use --device cpu")


def check_mpi_profile(config: ServeConfig) -> None:
    """The Open MPI that is there must be able to do what the launch profile asks for.

    Under srun no mpirun takes part, and none needs to be there.
    """
    place = world_from_environment()
    if place is not None and place.launched_by == "srun":
        return
    if refusal := inspect_open_mpi(find_mpirun()).refusal(config.mpi_profile):
        raise LaunchError(f"mpi_profile={config.mpi_profile!r}: {refusal}")


def check_port(config: ServeConfig) -> None:
    """The HTTP port must be free on the address asked for."""
    fix = "choose another with --port"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
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
    if why := why_unwritable(nearest):
        raise LaunchError(
            f"ssd_dir={str(folder)!r}: {nearest} is not writable ({why}); choose another with --ssd-dir"
        )
    for lock in sorted(folder.glob("store-*/lock")):
        with contextlib.suppress(OSError):  # a lock that cannot be opened is told when the tier starts
            if lock_holder(lock.parent) is not None:
                raise LaunchError(
                    f"ssd_dir={str(folder)!r} is in use by another cluster ({lock} is locked); "
                    "stop it, or choose another folder with --ssd-dir"
                )


def check_new_file(option: str, file: Path) -> None:
    """The folder of a file that a run makes is there and can be written, and the file is new."""
    if file.exists() or file.is_symlink():
        raise LaunchError(
            f"{option}={str(file)!r} exists already; remove it, or choose another file with --{option}"
        )
    if option == "trace" and parts_folder(file).exists():
        raise LaunchError(
            f"{parts_folder(file)} is there, of a run that was killed; join it with "
            f"`mooncake-lite join-trace {file}`, remove it, or choose another file with --trace"
        )
    if why := why_unwritable(file.absolute().parent):
        raise LaunchError(
            f"{option}={str(file)!r}: no file can be made in {file.absolute().parent} ({why}); "
            f"choose a file in a folder that exists and is writable with --{option}"
        )


def check_tier_size(config: ServeConfig, model: FoundModel) -> None:
    """A tier must hold a file with one block."""
    from store.ssd.segment_writer import file_nbytes

    layout = block_layout(config, model.config)
    if config.ssd_dir and config.ssd_bytes < file_nbytes(layout, 1):
        raise ConfigError(
            f"ssd_bytes={config.ssd_bytes} holds no block of {layout.nbytes} B; "
            f"raise it to at least {file_nbytes(layout, 1)}"
        )


def roles_here(config: ServeConfig, roles: list[str] | None = None) -> list[str]:
    """Roles of the ranks that mpirun puts on this host: by slots, in the order of --hosts.

    roles   of all ranks, if not as in the configuration

    Under a user's own mpirun, its word on how many ranks are here counts.
    """
    roles = config.roles if roles is None else roles
    near = ranks_near()
    if near is not None:
        return roles[near.start : near.stop]
    hosts = parse_hosts(config.hosts)
    if not hosts:
        return roles
    mine, first = [], 0
    for name, slots in hosts:
        if _is_here(name):
            mine += roles[first : first + slots]
        first += slots
    return mine


def check_shared_memory(config: ServeConfig, model: FoundModel, machine: Machine, roles: list[str]) -> None:
    """Windows lie in /dev/shm: one too small makes MPI hang, or kills ranks with SIGBUS later."""
    if any("backing_directory" in argument for argument in config.mpi_arg):
        return
    if machine.shared_memory_bytes < 0:
        raise LaunchError("there is no /dev/shm here; mount one: mount -t tmpfs tmpfs /dev/shm")
    needed = sum(segment_bytes(config, model.config, role) + MPI_SHARED_BYTES for role in roles)
    if needed > machine.shared_memory_bytes:
        size = -(-needed >> 20)
        raise LaunchError(
            f"/dev/shm has {_mib(machine.shared_memory_bytes)} free, {_mib(needed)} are needed (pools and "
            f"staging); lower {_pool_flags(config)}, enlarge it (mount -o remount,size={size}m /dev/shm, or "
            f"docker run --shm-size={size}m), or use a folder: --mpi-arg '--mca osc_sm_backing_directory DIR'"
        )


def check_memory(config: ServeConfig, model: FoundModel, machine: Machine, roles: list[str]) -> None:
    """Weights once; every rank's segment and runtime; the pages of those that compute."""
    needed = model.weights_bytes
    for role in roles:
        needed += segment_bytes(config, model.config, role) + scratch_bytes(config, model.config, role)
        if config.engine == "emulated":
            needed += EMULATED_RANK_BYTES
        else:
            needed += RANK_BYTES + (config.kv_cache_bytes if role in COMPUTE_ROLES else 0)
    if needed > machine.memory_bytes:
        raise LaunchError(
            f"{_mib(machine.memory_bytes)} of memory are available, {_mib(needed)} are needed (weights, "
            f"pages, pools, runtime); lower --kv-cache-bytes or {_pool_flags(config)}, or use fewer ranks"
        )


def _pool_flags(config: ServeConfig) -> str:
    """The flags that say how much memory ranks share."""
    flags = ["--pool-bytes"] if config.has_pool else []
    flags += ["--lend-bytes"] if config.lend_bytes else []
    return " or ".join(flags or ["--staging-bytes"])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
