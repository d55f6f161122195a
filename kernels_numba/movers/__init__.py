"""Moving KV: new tokens into pages, pages into contiguous blocks and back, pages onto pages.

    blocks          the public functions, their checks and the index mapping; start here
    block_kernels   the movers on the CPU, and block_kernels_cuda the same on CUDA
    codec_kernels   encoding and decoding on the way, and codec_kernels_cuda
    rotary          new keys and queries, turned by their position on the way, and rotary_cuda

The doors are `kernels_numba.scatter_kv`, `gather_blocks`, `scatter_blocks` and `copy_pages`. The codecs
themselves are in `kernels_numba.codecs`. Explained in docs/explain/paged-attention.md.
"""
