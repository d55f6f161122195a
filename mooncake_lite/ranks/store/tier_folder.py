"""Folders of --ssd-dir, by the store rank that they belong to."""

from __future__ import annotations

import shutil
from pathlib import Path

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import LaunchError
from store.errors import StoreError
from store.layout import BlockLayout
from store.ssd.tier_folder import adoptable_folders
from store.tier import HDF5Tier


def open_tier(config: ServeConfig, index: int, layout: BlockLayout, fingerprint: bytes) -> HDF5Tier | None:
    """The tier of store rank number `index`, None without --ssd-dir.

    Prints a line for each file set aside, and one when the disk is smaller than the tier may become.

    Raises LaunchError when the folder cannot be used, or another cluster uses it.
    """
    if not config.ssd_dir:
        return None
    root = Path(config.ssd_dir).expanduser().absolute()
    own = root / f"store-{index}"
    try:
        others = [folder for folder in adoptable_folders(root, index, config.store) if folder != own]
        tier = HDF5Tier(own, config.ssd_bytes, layout, fingerprint.hex(), adopted=others)
    except StoreError as error:
        raise LaunchError(str(error)) from None
    for line in tier.notes:
        print(f"mooncake-lite: {line}", flush=True)
    free = shutil.disk_usage(own).free
    if config.ssd_bytes > free + tier.nbytes:
        print(f"mooncake-lite: {too_large(own, config.ssd_bytes, free, tier.nbytes)}", flush=True)
    return tier


def too_large(folder: Path, ssd_bytes: int, free: int, held: int) -> str:
    """The warning about a tier that its disk has no space for."""
    return (
        f"--ssd-bytes {ssd_bytes} is more than the disk of {folder} has space for: {free} B are free and the "
        f"tier holds {held} B; when the disk is full, blocks are not saved"
    )
