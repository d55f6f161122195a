"""Which folders of --ssd-dir belong to which store rank."""

from __future__ import annotations

from pathlib import Path

from mooncake_lite.config import ServeConfig
from mooncake_lite.errors import LaunchError
from store.errors import StoreError
from store.layout import BlockLayout
from store.tier import HDF5Tier
from store.tier_folder import adoptable_folders


def open_tier(config: ServeConfig, index: int, layout: BlockLayout, fingerprint: bytes) -> HDF5Tier | None:
    """The tier of store rank number `index`, None without --ssd-dir; prints a line per file set aside.

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
    return tier
