"""The parts of the report on a GPU: checks, figures, and kernels lowered without a GPU.

    gpu_checks, gpu_mover_checks   attention and movers against torch in float64, or bit for bit
    gpu_figures     measurements, each a benchmark row
    gpu_lowering    every CUDA kernel lowered to PTX with the types it is launched with; also used by labs
    gpu_runner      processes that are watched, so that one that dies costs one check

The door is `kernels_numba.gpu_report`: `python -m kernels_numba.gpu_report --json FILE`. Explained in
docs/explain/paged-attention.md.
"""
