"""The door to the SSD tier, which is in store/ssd: `HDF5Tier` is one tier of one store rank.

Imported by store ranks and by tools. store/ssd/__init__.py says what each file there does.
"""

from store.ssd.tier import COUNTERS, SEGMENT_NBYTES, HDF5Tier

__all__ = ["COUNTERS", "SEGMENT_NBYTES", "HDF5Tier"]
