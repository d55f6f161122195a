"""The clusters of this user that run on this host: which URL belongs to which run folder.

Used by the commands that talk to a running cluster, and by what says that one is ready. The address of a
cluster is in the gateway.json (0600) of its run folder. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.run_dir import bases, sweep


class Running(NamedTuple):
    """One cluster that takes connections."""

    url: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.url} ({self.folder})"


def running() -> list[Running]:
    """Every cluster of this user, by URL. What killed ones have left is removed."""
    sweep()
    pattern = f"mooncake-lite.{os.getuid()}.*"
    folders = [path for base in bases() for path in base.glob(pattern) if (path / "control").is_socket()]
    return sorted(Running(_url(folder), folder) for folder in folders)


class _Address(msgspec.Struct):
    host: str
    port: int

    def __str__(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class _Settings(msgspec.Struct):
    """What is needed here of gateway.json, which another version of this program may have written."""

    config: _Address


def _url(folder: Path) -> str:
    try:
        file = (folder / "gateway.json").read_bytes()
        return str(msgspec.json.decode(file, type=_Settings).config)
    except (OSError, msgspec.MsgspecError):
        return "unknown URL"


def where_else(how: str = "with --url") -> str:
    """What to do when no server answers at a URL. how: a command takes one."""
    if found := running():
        return f"running here: {', '.join(map(str, found))}; name one {how}"
    return f"start one with mooncake-lite serve, or say where it is {how}"


def ready_line(config: ServeConfig, folder: Path) -> str:
    """What `serve` prints when a cluster is ready."""
    name = config.served_model_name or os.path.basename(config.model.rstrip("/"))
    ranks = ", ".join(f"{rank} {role}" for rank, role in enumerate(config.roles))
    url = _Address(config.host, config.port)
    return f"serving {name} at {url} (ranks: {ranks}; run folder: {folder})"
