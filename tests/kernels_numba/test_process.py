"""How the kernels behave in a process: threads, imports, caches that cannot be written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kernels_numba
from tests.kernels_numba.paging import expected, make_paged, tolerance
from tests.kernels_numba.programs import run_python


@pytest.mark.quick
def test_importing_the_package_loads_neither_torch_nor_numba() -> None:
    program = """
        import sys, kernels_numba
        print([name for name in ("torch", "numba") if name in sys.modules], len(kernels_numba.__all__))
    """
    assert run_python(program) == "[] 14"


@pytest.mark.quick
def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paged_attention'"):
        kernels_numba.paged_attention  # noqa: B018


WORKQUEUE = """
    import threading
    import numpy as np
    import kernels_numba

    query = np.ones((4, 4, 64), np.float32)
    cache = np.ones((64, 2, 16, 64), np.float32)
    tables = np.arange(64, dtype=np.int32).reshape(4, 16)
    lens, ones = np.full(4, 256, np.int32), np.ones(4, np.int32)
    caches = cache.reshape(8, 2, 4, 2, 16, 64).copy()
    block = np.zeros((1, 8, 2, 2, 64, 64), np.float32)
    wrong = []

    def work():
        for _ in range(200):
            for out in (
                kernels_numba.paged_attention_decode(query, cache, cache, tables, lens, scale=1.0),
                kernels_numba.paged_attention_prefill(query, cache, cache, tables, ones, lens, scale=1.0),
            ):
                wrong.extend([out] if abs(out - 1).max() > 1e-5 else [])
            kernels_numba.gather_blocks(caches, tables[:1, :4], block)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    import numba
    print(numba.threading_layer(), len(wrong))
"""


def test_three_threads_may_call_the_kernels_at_once_even_on_the_layer_that_forbids_it() -> None:
    output = run_python(WORKQUEUE, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert output == "workqueue 0"


def test_two_threads_with_different_batches_both_get_their_own_result() -> None:
    batches = [make_paged(context_lens=[90, 33], query_lens=[1, 1], seed=seed) for seed in range(2)]
    start, results = threading.Barrier(2, timeout=30), [[], []]

    def work(i: int) -> None:
        batch = batches[i]
        caches = (batch.key_cache, batch.value_cache)
        start.wait()
        for _ in range(50):
            results[i].append(
                kernels_numba.paged_attention_decode(
                    batch.query, *caches, batch.block_tables, batch.context_lens, scale=batch.scale
                )
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for batch, outs in zip(batches, results):
        assert len(outs) == 50
        for out in outs:
            np.testing.assert_allclose(out, expected(batch), rtol=0, atol=tolerance("float32", 90))


def test_the_kernels_work_where_neither_the_home_nor_the_cache_folder_can_be_written(tmp_path) -> None:
    program = """
        import os, numpy as np, kernels_numba
        ids = np.zeros((1, 1), np.int32)
        out = np.zeros((1, 1, 2, 1, 8, 8), np.float32)
        kernels_numba.gather_blocks(np.ones((1, 2, 1, 1, 8, 8), np.float32), ids, out)
        print(int(out.sum()), os.environ["NUMBA_CACHE_DIR"])
    """
    nowhere = tmp_path / "a file, so no folder can be made below it"
    nowhere.write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    output = run_python(
        program, HOME=str(nowhere), MOONCAKE_LITE_CACHE=str(nowhere / "cache"), TMPDIR=str(temporary)
    )
    total, folder = output.split(" ", 1)
    assert total == "128"
    assert Path(folder).parent == temporary
    assert list(temporary.iterdir()) == [], "the private folder ends with the process"


@pytest.mark.quick
def test_compiled_kernels_go_to_the_project_s_cache_folder_unless_the_user_chose_another(tmp_path) -> None:
    program = "import os, kernels_numba.runtime; print(os.environ['NUMBA_CACHE_DIR'])"
    chosen = run_python(program, MOONCAKE_LITE_CACHE=str(tmp_path))
    assert Path(chosen).parent == tmp_path
    inherited = run_python(
        program, MOONCAKE_LITE_CACHE=str(tmp_path), NUMBA_CACHE_DIR="/elsewhere/kernels-0123"
    )
    assert inherited == chosen, "a folder that a parent process of ours chose is chosen anew"
    assert run_python(program, NUMBA_CACHE_DIR=str(tmp_path / "mine")) == str(tmp_path / "mine")
