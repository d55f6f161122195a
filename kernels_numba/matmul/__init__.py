"""Linear layers for decode: a few rows of x times a weight that is read once, plain or quantised.

    linear_layers   the public functions and the first versions, the naive one first; start here
    linear_blocks   how rows of weights lie in memory, in each format
    linear_tiles    v2: tiles of sums that stay in registers
    linear_tiles_fixed, linear_blocks_fixed   v3: quantised weights times x in fixed point

The doors are `kernels_numba.linear` and `kernels_numba.Linears`. Explained in docs/explain/model.md.
"""
