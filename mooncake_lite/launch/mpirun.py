"""The mpirun line of a cluster, and the environment that it needs.

Called by the launcher and by `serve --dry-run`. Pure: it starts nothing. It knows Open MPI 5's options,
measured ones only. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.run_dir import ENVIRONMENT

COMMON = ("--bind-to", "none", "--map-by", ":OVERSUBSCRIBE")
"""Two ranks bound to one core cost 8 ms per message; more ranks than slots are refused without the second."""

PROFILES: dict[str, tuple[str, ...]] = {
    # ob1 and ULFM: a killed rank does not end the job. osc/ucx prints an error at every window otherwise.
    "ft": ("--with-ft", "ulfm", "--mca", "pml", "ob1", "--mca", "osc", "^ucx"),
    # UCX stays off without an RDMA device unless any transport and any device will do.
    "fast": (
        *("--mca", "pml", "ucx", "--mca", "osc", "ucx"),
        *("--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"),
    ),
}

SECRET = "MOONCAKE_LITE_API_KEY"
TENANTS = "MOONCAKE_LITE_TENANTS"
SECRETS = {"api_key": SECRET, "tenants": TENANTS}
"""Fields that travel in the environment and never in a command line, where every user of the host could read
them."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How threads of OpenMP wait for each other, where the user chooses it (threads.py)."""

AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def host_option(hosts: list[tuple[str, int]]) -> list[str]:
    """The words that tell mpirun where ranks go; none where that is its own choice."""
    return ["--host", ",".join(f"{name}:{slots}" for name, slots in hosts)] if hosts else []


def parse_hosts(hosts: str) -> list[tuple[str, int]]:
    """[("a", 2), ("b", 2)] of "a:2,b:2"; one slot where none is given.

    Raises ConfigError when a part is no host with a count.
    """
    found = []
    for part in hosts.split(",") if hosts else []:
        name, _, slots = part.strip().partition(":")
        if not name or name.startswith("-") or not (slots or "1").isdigit() or int(slots or "1") < 1:
            raise ConfigError(f"hosts={hosts!r}: {part!r} is not HOST or HOST:SLOTS; write a:2,b:2")
        found.append((name, int(slots or "1")))
    return found


def rank_flags(config: ServeConfig) -> list[str]:
    """The flags that make this configuration again, without the mode's defaults and the secrets."""
    flags = []
    defaults = ServeConfig(mode=config.mode).to_dict() | {"mode": ServeConfig().mode}
    for field in fields(ServeConfig):
        value = getattr(config, field.name)
        if value == defaults[field.name] or field.name in (*SECRETS, "model", "mpi_arg", "hosts"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            flags += [flag, str(value)]
    return flags


def rank_command(config: ServeConfig) -> list[str]:
    """What every rank runs: the same command again, which finds itself inside mpirun."""
    return [sys.executable, "-m", "mooncake_lite", "serve", config.model, *rank_flags(config)]


def mpirun_line(
    mpirun: Path, config: ServeConfig, command: list[str], environment: Mapping[str, str]
) -> list[str]:
    """The whole line. `environment` is the one mpirun will run in: its names are forwarded with -x. Where
    mpi_arg binds or maps ranks itself, COMMON does not: mpirun takes these options once.

    Raises ConfigError when hosts or mpi_arg cannot be understood.
    """
    words = split_words(config.mpi_arg)
    common = [word for pair in zip(COMMON[::2], COMMON[1::2]) if pair[0] not in words for word in pair]
    line = [str(mpirun), "-n", str(config.ranks), *common, *PROFILES[config.mpi_profile], "--output", "tag"]
    line += host_option(parse_hosts(config.hosts))
    for name in sorted(environment):
        if name in WAITING or name.startswith("MOONCAKE_LITE_"):
            line += ["-x", name]
    return [*line, *words, *command]


def split_words(arguments: tuple[str, ...]) -> list[str]:
    """Each --mpi-arg may hold several words: "--mca btl_tcp_if_include eth0". Raises ConfigError."""
    try:
        return [word for argument in arguments for word in shlex.split(argument)]
    except ValueError as error:
        raise ConfigError(f"mpi_arg={list(arguments)!r}: {error}") from None


def mpirun_environment(config: ServeConfig, run_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun: `base` and what a cluster needs on top of it."""
    environment = dict(base)
    environment["OMP_WAIT_POLICY"] = base.get("OMP_WAIT_POLICY", "passive")
    environment[ENVIRONMENT] = str(run_dir)
    environment["TMPDIR"] = str(run_dir / "session")
    for name, variable in SECRETS.items():
        if value := getattr(config, name):
            environment[variable] = value
        else:
            environment.pop(variable, None)
    if os.getuid() == 0:
        environment.update(AS_ROOT)
    return environment


def printable_line(line: list[str], environment: Mapping[str, str]) -> str:
    """The line as a user could type it, with the variables it needs; a secret is only named."""
    told = [name for name in (*AS_ROOT, *WAITING) if name in environment]
    shown = [f"{name}={shlex.quote(environment[name])}" for name in told]
    shown += [f'{name}="${name}"' for name in SECRETS.values() if name in environment]
    return " ".join([*shown, shlex.join(line)])


def dry_run(mpirun: Path, config: ServeConfig) -> str:
    """What `serve --dry-run` prints: the line as a user's own launcher would run it, without a run folder."""
    environment = mpirun_environment(config, Path("/nonexistent"), os.environ)
    for name in (ENVIRONMENT, "TMPDIR"):
        environment.pop(name)
    line = mpirun_line(mpirun, config, rank_command(config), environment)
    return printable_line(line, environment)
