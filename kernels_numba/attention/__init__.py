"""Paged attention, for decode and for prefill: ladders of versions, the naive one first.

    attention_decode    one new token per sequence; v0 is the naive form in NumPy; start here
    attention_prefill   many new tokens per sequence, after a prefix that may be cached
    attention_plain     what one row of the output asks for, in the plain versions
    attention_decode_tiles, attention_prefill_tiles   the tuned versions on the CPU
    attention_dealt     decode over contexts of which several members have parts
    attention_cuda, attention_rungs, attention_tiles_cuda    what is launched on CUDA, and its plain versions
    attention_decode_cuda, attention_mma_cuda   long contexts in pieces, and tensor cores

The doors are `kernels_numba.paged_attention_decode` and `kernels_numba.paged_attention_prefill`. Explained in
docs/explain/paged-attention.md.
"""
