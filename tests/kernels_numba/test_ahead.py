"""Compiling ahead: each step is compiled by one process, the others wait and load; what is reported."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from numba.core import event

from kernels_numba import ahead
from kernels_numba.ahead import KernelUse, Step, compile_ahead, steps_of

pytestmark = pytest.mark.quick


class FakeCache:
    """What Numba keeps on the disk: a step that is not there is compiled, one that is there is loaded."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.compiled: list[str] = []
        self.loaded: list[str] = []

    def step(self, name: str, compiling: Callable[[], object] = lambda: None) -> Step:
        def run() -> None:
            if name in self.held:
                self.loaded.append(name)
                return
            with event.trigger_event("numba:compile", data={}):
                self.compiled.append(name)
                compiling()
            self.held.add(name)

        return name, run


def silent(done: int, total: int, name: str) -> None:
    pass


def test_a_second_process_loads_what_the_first_has_compiled_and_compiles_the_rest(tmp_path: Path) -> None:
    cache, begun, go_on = FakeCache(), threading.Event(), threading.Event()

    def compile_slowly() -> None:
        begun.set()
        assert go_on.wait(30)

    slow, quick = cache.step("slow", compile_slowly), cache.step("quick")
    first = threading.Thread(target=compile_ahead, args=([slow, quick], silent, tmp_path))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=compile_ahead, args=([slow, quick], silent, tmp_path))
    second.start()
    while "quick" not in cache.held:  # the second does not stand behind the first one's step
        second.join(0.01)
        assert second.is_alive()
    go_on.set()
    first.join(30)
    second.join(30)
    assert cache.compiled == ["slow", "quick"]
    assert sorted(cache.loaded) == ["quick", "slow"]


def test_a_process_that_has_waited_too_long_compiles_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "WAIT_S", 0.0)
    cache = FakeCache()
    with (tmp_path / "compile stuck.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        compile_ahead([cache.step("stuck")], silent, tmp_path)
    assert cache.compiled == ["stuck"]


def test_where_no_lock_can_be_made_each_process_compiles(tmp_path: Path) -> None:
    cache, nowhere = FakeCache(), tmp_path / "a file"
    nowhere.write_text("")
    compile_ahead([cache.step("alone")], silent, nowhere / "kernels")
    assert cache.compiled == ["alone"]


def test_every_step_is_reported_once_something_is_compiled_and_nothing_when_all_is_cached(
    tmp_path: Path,
) -> None:
    cache, told = FakeCache(), []
    steps = [cache.step("one"), cache.step("two"), cache.step("three")]
    cache.held.add("two")
    compile_ahead(steps, lambda *now: told.append(now), tmp_path)
    assert told == [(0, 3, "one"), (2, 3, "three"), (3, 3, "")]
    compile_ahead(steps, lambda *now: told.append(now), tmp_path)
    assert len(told) == 3


def test_a_long_wait_for_another_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE_S", 0.0)
    cache, told = FakeCache(), []
    held = (tmp_path / "compile long.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def report(*now: object) -> None:
        told.append(now)
        cache.held.add("long")  # the other process is done
        held.close()

    compile_ahead([cache.step("long")], report, tmp_path)
    assert told == [(0, 1, "long"), (1, 1, "")]
    assert cache.compiled == []


def test_only_what_a_model_uses_is_compiled() -> None:
    least = {name for name, _ in steps_of(KernelUse(dtype="bfloat16"))}
    assert least == {"prefill attention bfloat16", "decode attention bfloat16", "new tokens bfloat16"}
    published = KernelUse(dtype="float32", formats=("Q4_1",), unpacked=("Q4_1",), blocks=True, codec="int8")
    more = {name for name, _ in steps_of(published)} - {name.replace("bfloat16", "float32") for name in least}
    linear = {"linear layers", "linear layers Q4_1", "unpacking weights"}
    assert more == linear | {"norms and SwiGLU", "decode layers", "pool blocks"}


def test_a_helper_is_told_exactly_what_its_parent_needs() -> None:
    use = KernelUse(dtype="float32", formats=("Q4_1", "Q8_0"), unpacked=("Q8_0",), blocks=True, codec="fp8")
    assert KernelUse.from_json(use.to_json()) == use
