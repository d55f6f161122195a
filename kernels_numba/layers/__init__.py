"""Whole layers out of the kernels of the other folders, without Python between them.

    paged_pass      one forward pass over paged KV: what its layers share is checked once
    decode_layers   all decoder layers of a decode step in one compiled call
    row_kernels     what a layer computes row by row: the norm with its residual, and SwiGLU

The doors are `kernels_numba.PagedPass`, `rms_norm` and `silu_multiply`. Explained in docs/explain/model.md.
"""
