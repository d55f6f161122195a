"""The order of tests, what a worker takes at once, and two options of pytest.

`--device cuda` lets the tests of model and engine that ask for the fixture `device` compute on a GPU.
`--soak N` tries N times the examples, drawn anew.

`make soak` uses `--soak`. It selects property tests and tests that ask for the fixture `soak`. Without the
option all tests run as they stand in their files, and repeat themselves.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from mooncake_lite.launch import serve_child

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
"""Before torch is loaded: threads that wait must not take the cores from the cluster that is tested. Those of
NumPy sleep at once (2 ** 4 cycles), in every process that tests start."""

if worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    # no two of four choose the same port
    serve_child.FIRST_PORT, serve_child.PORTS = 20_000 + 3_000 * (int(worker) % 4), 3_000

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPREAD = ("tests/kernels_numba/gpu/test_cuda.py", "tests/tutorials/test_tutorials.py")
"""Files whose tests have nothing in common but a parameter: workers share them, a parameter at a time."""

TOGETHER = ("test_drawn.py", "test_lm_eval.py", "test_recording.py", "test_serving.py")
"""Files in tests/cluster that ask one cluster, the fixture `serving`: one worker takes them all."""

LONG = (
    "tests/mooncake_lite/model/test_model_forward.py",
    "tests/kernels_numba/gpu/test_cuda.py",
    "tests/tutorials/test_tutorials.py",
    "tests/cluster/test_poison.py",
    "tests/cluster/test_families.py",
    "tests/mooncake_lite/model/test_model_default.py",
    "tests/cluster/test_demo.py",
    "tests/mooncake_lite/labs/test_dev_check.py",
    "tests/kernels_numba/matmul/test_linear_fixed.py",
    "tests/transport/test_ranks.py",
    "tests/mooncake_lite/launch/test_stopping.py",
    "tests/store/mooncake_store/test_processes.py",
    "tests/cluster/test_users.py",
    "tests/cluster/test_two_nodes.py",
    "tests/store/mooncake_store/test_conformance.py",
    "tests/transport/test_membership.py",
    "tests/mooncake_lite/gateway/test_process.py",
)
"""The files that take longest, in the order in which `make test` begins them.

Short files follow, so that no worker waits long for the other at the end. The first file compiles the kernels
that clusters use, while the other worker is busy with CUDA, which uses none of them.
"""

QUICK_SHARE = 5
"""`make check` tries so many times fewer examples of a property than `make test`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=0, metavar="N", help="N times the examples, and only tests that have such"
    )
    parser.addoption("--device", default="cpu", help="where models compute in tests of model and engine")


def pytest_configure(config: pytest.Config) -> None:
    """Settle how many examples a property tries, before files of tests are imported."""
    soak = config.getoption("--soak")
    most = 100 * max(1, soak) // (QUICK_SHARE if config.option.markexpr == "quick" else 1)
    settings.register_profile(
        "tests", max_examples=most, deadline=None, derandomize=not soak, database=None, print_blob=bool(soak)
    )
    settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Look for no garbage meanwhile, and later not among what was imported, which stays to the end.

    Imports leave little. The searches took a third of the collection, and as long again at the end of pytest.
    """
    gc.disable()
    try:
        _import_own_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                # torch cuts 42 off, and pytest goes to each of them six times a test
                logger.propagate = True


def _import_own_share(config: pytest.Config) -> None:
    """Import every n-th file of tests, as one of n workers, which then find compiled what others imported.

    In a fresh clone each worker would compile all of them. What fails here fails again where it is told.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    paths = [Path(one.partition("::")[0]).resolve() for one in config.args] if workers > 1 else []
    files = [
        file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))
    ]
    for file in files[int(worker or "0") % workers :: workers]:
        if not pytest_ignore_collect(file, config):
            with suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def examples(count: int) -> int:
    """Return how many examples to try where `make test` tries `count`, for the max_examples of a test."""
    return max(1, count * settings().max_examples // 100)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where models compute: cpu, or what --device says."""
    return str(pytestconfig.getoption("--device"))


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> int:
    """How many times the examples of `make test` a test is to try: 1, or what --soak says.

    For tests that repeat something without Hypothesis. They choose other examples when this is above 1.
    """
    return max(1, request.config.getoption("--soak"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m cluster` or `-m quick`, import only files that have such tests."""
    mark = config.option.markexpr
    if mark not in ("cluster", "quick") or not collection_path.name.startswith("test_"):
        return None
    return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


class ByFile(LoadScopeScheduling):
    """Gives a worker a whole file at a time, but for files that are SPREAD, and those that go TOGETHER.

    The public way, --dist=loadgroup, does nothing: xdist 3.8 appends groups to names in a way that pytest 9.2
    does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.startswith("tests/cluster/") and file.endswith(TOGETHER):
            return "tests/cluster"
        return file + test.partition("[")[2] if file in SPREAD else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Tests are dealt out in this order."""
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))
    if config.getoption("--soak"):
        _select_repeating(config, items)


def _select_repeating(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep property tests, state machines, and tests that ask for the fixture `soak`."""
    kept = [
        i
        for i in items
        if is_hypothesis_test(getattr(i, "obj", None)) or "soak" in getattr(i, "fixturenames", ())
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
