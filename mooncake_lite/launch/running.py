"""The clusters of this user that run on this host: which URL belongs to which run folder.

Used by the commands that talk to a running cluster, and by whoever says that one is ready. The address of a
cluster is in the gateway.json (0600) of its run folder. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from mooncake_lite.config.reading import config_from
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


def _url(folder: Path) -> str:
    file = folder / "gateway.json"
    try:
        return config_from(msgspec.json.decode(file.read_bytes())["config"], str(file)).url
    except OSError:
        return "no URL"  # the cluster is ending at this moment


def where_else() -> str:
    """What to do when no server answers at a URL."""
    if found := running():
        return f"running here: {', '.join(map(str, found))}; name one with --url"
    return "start one with mooncake-lite serve, or say where it is with --url"


def ready_line(config: ServeConfig, folder: Path) -> str:
    """What `serve` prints when a cluster is ready."""
    name = config.served_model_name or os.path.basename(config.model.rstrip("/"))
    ranks = ", ".join(f"{rank} {role}" for rank, role in enumerate(config.roles))
    return f"serving {name} at {config.url} (ranks: {ranks}; run folder: {folder})"
