"""The KVCache pool: what a block is called, where it lies, and what is kept when room runs out.

Used by the conductor (`store.directory`), by store ranks (`store.tier`, `store.tier_writer`) and by
whoever names blocks (`store.keys`, `store.layout`). Knows nothing of models, requests' meaning,
messages or scheduling. Importing it loads neither torch, MPI, numba nor h5py.
"""
