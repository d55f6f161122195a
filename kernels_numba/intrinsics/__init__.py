"""The words that kernels are made of: vectors in registers, 16-bit floats, copies past the caches.

    words             Numba intrinsics out of functions from LLVM values to an LLVM value; start here
    numerics          scalars: 16-bit floats as bits, exp2, a copy of bytes by address
    vectors           vectors and tiles of them, held in registers
    vectors_codes, linear_vectors, register_blocks   exact products of bytes, rows of weights, matrix products
    streaming         copies that are too large for the caches

Called inside compiled kernels only. `kernels_numba.runtime` is imported first, because it sets up Numba's
cache. An edit here starts a fresh cache of compiled kernels. Explained in docs/explain/paged-attention.md.
"""
