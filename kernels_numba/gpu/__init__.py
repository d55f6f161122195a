"""CUDA, and what stands for it where there is no GPU.

    backend_cuda      the one door to Numba's CUDA target; start here
    backend_ptx       instructions that Numba does not offer
    backend_twins     the same names for the simulator, in plain Python
    simulator_blocks  blocks and shared memory of the simulator, open to an observer: the race checker of labs

Used by the *_cuda files of other folders, and only when a device array turns up. Explained in
docs/explain/paged-attention.md and docs/explain/race-checker.md.
"""
