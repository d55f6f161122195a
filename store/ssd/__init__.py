"""The SSD tier of a store rank: blocks in sealed HDF5 files, and the threads that write and read them.

    tier            one tier, found by key; start here
    segment_file, segment_writer, segment_frame   a sealed file, an open one, and what makes it HDF5
    sealed_set      which file serves each key, and the order of eviction
    compaction, tier_removals   removal of blocks, and files that are rewritten without them
    tier_writer, tier_reader    the threads of a store rank, from DRAM to SSD and back
    tier_folder, tier_health, writeback   the folder, its troubles in words, early writes to disk
    tier_at_rest    folders seen from outside, for the command line

The door is `store.tier`. Explained in docs/reference/hdf5-tier.md.
"""
