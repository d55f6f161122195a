"""The table of paths: measured once per machine, read by every process, never believed when it is damaged."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from mooncake_lite.config.cache import VARIABLE, locked
from mooncake_lite.model import path_table
from mooncake_lite.model.path_table import PathTable, this_machine
from mooncake_lite.model.projection import Paths
from mooncake_lite.tools.doctor.command import _linear_paths

pytestmark = pytest.mark.quick

MACHINE = {"cpu": "a processor", "threads": 2}
START = '{"machine": {"cpu": "a processor", "threads": 2}, '


class Measuring:
    """Counts the kinds that were measured."""

    def __init__(self, fixed: int = 2, tiles: int = 16) -> None:
        self.kinds: list[str] = []
        self.found = Paths(fixed, tiles)

    def __call__(self, kind: str) -> Paths:
        self.kinds.append(kind)
        return self.found


def refuse(kind: str) -> Paths:
    raise AssertionError(f"{kind} is measured again")


def test_a_second_process_reads_what_the_first_has_measured(own_cache: Path) -> None:
    assert PathTable(MACHINE).update({"a", "b"}, Measuring()) == {"a": Paths(2, 16), "b": Paths(2, 16)}
    assert PathTable(MACHINE).update({"a"}, refuse)["a"] == Paths(2, 16)


def test_the_cost_of_a_parallel_region_is_measured_once_and_kept_with_the_paths(own_cache: Path) -> None:
    assert PathTable(MACHINE).region_us(lambda: 1.5) == 1.5
    PathTable(MACHINE).update({"a"}, Measuring())
    assert PathTable(MACHINE).region_us(lambda: 99.0) == 1.5
    assert PathTable(MACHINE).read().paths == {"a": Paths(2, 16)}


def test_another_model_adds_its_kinds_of_layers(own_cache: Path) -> None:
    PathTable(MACHINE).update({"a"}, Measuring())
    second = Measuring(0, 8)
    PathTable(MACHINE).update({"a", "c"}, second)
    assert second.kinds == ["c"]
    assert PathTable(MACHINE).read().paths == {"a": Paths(2, 16), "c": Paths(0, 8)}


def test_the_table_and_the_doctor_tell_how_busy_the_machine_was(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, load in (("a", 0.5), ("b", 7.04), ("c", 1.0)):
        monkeypatch.setattr(path_table.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        PathTable(MACHINE).update({kind}, Measuring())
    path = PathTable(MACHINE).path
    told = PathTable(MACHINE).read().measured
    assert [one.load for one in told] == [0.5, 7.0, 1.0]
    finding = _linear_paths(path.parent)
    assert finding.value == f"kinds measured: 3 at 2 threads ({told[1].at}, load 7.0)"
    assert str(path.parent) in finding.follows


def test_another_machine_has_a_table_of_its_own(own_cache: Path) -> None:
    PathTable(MACHINE).update({"a"}, Measuring())
    other = Measuring()
    PathTable({**MACHINE, "threads": 1}).update({"a"}, other)
    assert other.kinds == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"machine": {"cpu": "a processor", "threads": 2}}',
        START + '"region_us": 1.5, "paths": {"a": {"fixed": 2}}}',
        START + '"region_us": 1.5, "paths": {"a": {"fixed": 4, "tiles": 2}}}',
        START + '"region_us": 1.5, "paths": {"a": {"fixed": 0, "tiles": 4096}}}',
        START + '"region_us": 1.5, "paths": {"a": {"fixed": false, "tiles": 2.5}}}',
        START + '"region_us": -1, "paths": {}}',
        START + '"region_us": "1", "paths": {}}',
        START + '"region_us": Infinity, "paths": {}}',
        START + '"measured": 5, "region_us": 1.5, "paths": {"a": {"fixed": 2, "tiles": 2}}}',
        START.replace("a processor", "another")
        + '"region_us": 1.5, "paths": {"a": {"fixed": 2, "tiles": 2}}}',
        "\xff\xfe",
    ],
)
def test_a_damaged_or_foreign_table_is_measured_again(text: str, own_cache: Path) -> None:
    table = PathTable(MACHINE)
    table.path.write_bytes(text.encode("latin-1"))
    measuring = Measuring()
    assert table.update({"a"}, measuring) == {"a": Paths(2, 16)}
    assert measuring.kinds == ["a"]
    assert json.loads(table.path.read_bytes())["paths"] == {"a": {"fixed": 2, "tiles": 16}}


def test_of_processes_that_start_at_once_one_measures(own_cache: Path) -> None:
    started, measured, results = threading.Event(), [], []

    def slowly(kind: str) -> Paths:
        measured.append(kind)
        started.set()
        waiting.wait(10)
        return Paths(1, 4)

    waiting = threading.Event()
    first = threading.Thread(target=lambda: results.append(PathTable(MACHINE).update({"a"}, slowly)))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=lambda: results.append(PathTable(MACHINE).update({"a"}, refuse)))
    second.start()
    waiting.set()
    first.join()
    second.join()
    assert measured == ["a"]
    assert results == [{"a": Paths(1, 4)}] * 2


def test_a_process_that_waited_too_long_measures_for_itself(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_table, "WAIT_S", 0.01)
    table = PathTable(MACHINE)
    with locked(f"linear-paths-{table.path.stem}"):
        assert table.update({"a"}, Measuring()) == {"a": Paths(2, 16)}
    assert table.read().paths == {}


def test_without_a_cache_folder_every_process_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    assert PathTable(MACHINE).update({"a"}, Measuring()) == {"a": Paths(2, 16)}


def test_a_table_does_not_grow_without_end(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_table, "MOST_KINDS", 2)
    PathTable(MACHINE).update({"a", "b"}, Measuring())
    PathTable(MACHINE).update({"b", "c"}, Measuring())
    assert PathTable(MACHINE).read().paths.keys() == {"b", "c"}


def test_a_machine_is_told_by_its_processor_threads_and_versions(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    one, two = this_machine(1), this_machine(2)
    assert one["cpu"]
    assert {key for key in one if one[key] != two[key]} == {"threads"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as other:
            other.setenv(name, "some other")
            assert this_machine(1) != one, name
