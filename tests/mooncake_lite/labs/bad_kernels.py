"""Small CUDA kernels with one fault each, for the race checker. All take numbers and an output of N.

The two lines of a fault end with `# one` and `# other`; of a thread that has ended there is no line.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN201

import numpy as np
from numba import cuda

N = 16


def missing_barrier(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    shared[i] = numbers[i]  # one
    out[i] = shared[(i + 1) % N]  # other


def missing_barrier_at_the_end_of_a_tile(numbers, out):
    tile = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    total = np.float32(0)
    for start in range(0, N, 4):
        if i < 4:
            tile[i] = numbers[start + i]  # one
        cuda.syncthreads()
        for k in range(4):
            total += tile[k]  # other
    out[i] = total


def two_threads_write_a_cell(numbers, out):
    pairs = cuda.shared.array(N // 2, np.float32)
    i = cuda.threadIdx.x
    pairs[i // 2] = numbers[i]  # one # other
    cuda.syncthreads()
    out[i] = pairs[i // 2]


def read_before_the_first_write(numbers, out):
    padded = cuda.shared.array((2, N), np.float32)
    i = cuda.threadIdx.x
    padded[0, i] = numbers[i]
    cuda.syncthreads()
    out[i] = padded[0, i] + padded[1, i]  # one


def integers_read_before_the_first_write(numbers, out):
    order = cuda.shared.array(N, np.int32)
    i = cuda.threadIdx.x
    if i > 0:
        order[i] = i - 1
    cuda.syncthreads()
    out[i] = numbers[order[i] % N]  # one


def barrier_in_a_branch(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    shared[i] = numbers[i]
    if i < N // 2:
        cuda.syncthreads()  # one
    out[i] = shared[i]


def a_barrier_in_each_branch(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    shared[i] = numbers[i]
    if i < N // 2:
        cuda.syncthreads()  # one
    else:
        cuda.syncthreads()  # other
    out[i] = shared[N - 1 - i]


def some_threads_return_early(numbers, out):
    shared = cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    if i >= N - 3:
        return
    shared[i] = numbers[i]
    cuda.syncthreads()  # one
    out[i] = shared[N - 4 - i]


def a_plain_read_beside_atomic_sums(numbers, out):
    total = cuda.shared.array(1, np.float32)
    i = cuda.threadIdx.x
    if i == 0:
        total[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(total, 0, numbers[i])  # one
    out[i] = total[0]  # other


def a_race_in_the_second_array_of_a_line(numbers, out):
    first, second = cuda.shared.array(N, np.float32), cuda.shared.array(N, np.float32)
    i = cuda.threadIdx.x
    first[i] = numbers[i]
    second[i] = numbers[i]  # one
    out[i] = first[i] + second[(i + 1) % N]  # other


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        missing_barrier,
        missing_barrier_at_the_end_of_a_tile,
        two_threads_write_a_cell,
        read_before_the_first_write,
        integers_read_before_the_first_write,
        barrier_in_a_branch,
        a_barrier_in_each_branch,
        some_threads_return_early,
        a_plain_read_beside_atomic_sums,
        a_race_in_the_second_array_of_a_line,
    )
}
