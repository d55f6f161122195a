"""Small CUDA kernels without a fault, in which the race checker must find nothing."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201

import numpy as np
from numba import cuda

N = 16


def neighbour(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    shared[i] = numbers[i]
    cuda.syncthreads()
    out[i] = shared[(i + 1) % N]


def tree_sum(numbers, out):
    sums = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    sums[i] = numbers[i]
    cuda.syncthreads()
    width = N // 2
    while width > 0:
        if i < width:
            sums[i] += sums[i + width]
        cuda.syncthreads()
        width //= 2
    out[i] = sums[0]


def tiles(numbers, out):
    tile = cuda.shared.array((2, 4), np.float32)
    i = cuda.threadIdx.x
    total = np.float32(0)
    for start in range(0, N, 4):
        if i < 4:
            tile[i % 2, i // 2] = numbers[start + i]
        cuda.syncthreads()
        for row in range(2):
            line = tile[row]
            for column in range(2):
                total += line[column]
        cuda.syncthreads()
    out[i] = total


def counter(numbers, out):
    count = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = 0
    cuda.syncthreads()
    if numbers[i] > 3:
        cuda.atomic.add(count, 0, 1)
    cuda.syncthreads()
    out[i] = count[0]


def whole_block_returns(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x > 0:
        return
    shared[i] = numbers[i]
    cuda.syncthreads()
    out[i] = shared[N - 1 - i]


def two_arrays_on_one_line(numbers, out):
    one, other = cuda.shared.array(N, np.float32), cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    one[i], other[N - 1 - i] = numbers[i], numbers[i]
    cuda.syncthreads()
    out[i] = one[N - 1 - i] + other[i]


KERNELS = {
    kernel.__name__: kernel
    for kernel in (neighbour, tree_sum, tiles, counter, whole_block_returns, two_arrays_on_one_line)
}
