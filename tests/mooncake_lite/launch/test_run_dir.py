"""The run folder: private, short, locked while somebody uses it, gone when nobody does."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import LaunchError
from mooncake_lite.launch import job
from mooncake_lite.launch import run_dir as module
from mooncake_lite.launch.rank_process import RankFile
from mooncake_lite.launch.run_dir import RunDir, bases, remove_segments, sweep
from mooncake_lite.ranks.process import RankProcess
from tests.patience import wait_until
from tests.python import printed_by

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only base where run folders are made and swept in these tests."""
    folder = tmp_path_factory.mktemp("b")
    monkeypatch.setattr(module, "bases", lambda: [folder])
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_what_is_in_it_are_the_users_alone(base: Path) -> None:
    folder = RunDir.create()
    assert folder.path.parent == base
    modes = [mode(path) for path in (folder.path, folder.path / "session", folder.path / "alive")]
    assert modes == [0o700, 0o700, 0o600]
    folder.remove()
    assert list(base.iterdir()) == []


def test_two_clusters_get_two_folders() -> None:
    first, second = RunDir.create(), RunDir.create()
    assert first.path != second.path
    first.remove()
    assert second.path.exists()


def test_a_folder_that_another_starts_sweep_has_locked_is_made_anew(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, list[int]()

    def taken_once(lock: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", taken_once)
    run_dir = RunDir.create()
    assert [path.name for path in base.iterdir()] == [run_dir.path.name]
    assert run_dir.leave()


def test_a_base_whose_path_is_too_long_for_a_socket_is_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(module, "bases", lambda: [long, base])
    assert RunDir.create().path.parent == base
    monkeypatch.setattr(module, "bases", lambda: [long])
    with pytest.raises(LaunchError, match=r"too long for a socket .*set TMPDIR to a short path"):
        RunDir.create()
    assert list(long.iterdir()) == []


def test_a_folder_that_is_open_to_others_is_not_joined(base: Path) -> None:
    path = base / "mooncake-lite.0.feed"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(LaunchError, match="belongs to somebody else or is open to others"):
        RunDir.join(path)
    link = base / "link"
    link.symlink_to(RunDir.create().path)
    with pytest.raises(LaunchError, match="belongs to somebody else"):
        RunDir.join(link)


def test_a_folder_that_cannot_be_used_is_refused_and_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be used: Not a directory"):
        RunDir.join(base / "file" / "below")

    before = os.listdir("/proc/self/fd")
    with RunDir.create().path.joinpath("alive").open() as held:
        fcntl.flock(held, fcntl.LOCK_UN)
        fcntl.flock(held, fcntl.LOCK_SH)
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", Mock(side_effect=BlockingIOError(11, "being removed")))
            with pytest.raises(LaunchError, match="cannot be used: being removed"):
                RunDir.join(Path(held.name).parent)
            with pytest.raises(LaunchError, match="being removed"):
                RunDir.create()
    assert [path.name for path in base.iterdir() if path.name.startswith(".")] == []
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1, "of the folder that was made"


def test_a_job_whose_mpirun_cannot_be_started_leaves_no_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDir, "guard", Mock())
    monkeypatch.setattr(job, "start_child", Mock(side_effect=OSError("no more processes")))
    with pytest.raises(OSError, match="no more processes"):
        job.MpirunJob(ServeConfig(), Path("/bin/mpirun"), ["true"], {})
    assert list(base.iterdir()) == []


def test_a_sweep_leaves_a_folder_alone_whose_lock_cannot_be_opened(base: Path) -> None:
    odd = base / f"mooncake-lite.{os.getuid()}.odd"
    odd.mkdir()
    (odd / "alive").symlink_to("alive")
    assert sweep() == []
    assert odd.is_dir()


def test_whoever_leaves_last_removes_the_folder() -> None:
    launcher = RunDir.create()
    ranks = [RunDir.join(launcher.path) for _ in range(3)]
    assert [folder.leave() for folder in [launcher, *ranks]] == [False, False, False, True]
    assert not launcher.path.exists()
    assert ranks[0].leave() is False  # a second time changes nothing


def test_a_file_that_a_process_makes_while_it_ends_does_not_keep_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = RunDir.create()
    real = shutil.rmtree
    late = iter(["heart", "rank-0.json"])

    def rmtree(path: Path, **how: bool) -> None:
        real(path, **how)
        for name in itertools.islice(late, 1):
            path.mkdir()
            (path / name).touch()

    monkeypatch.setattr(module.shutil, "rmtree", rmtree)
    assert folder.leave()
    assert not folder.path.exists()


def waits_for_a_lock(process: subprocess.Popen[bytes]) -> bool:
    """The kernel marks the lines of those that wait by an arrow: "1: -> FLOCK  ADVISORY  WRITE 4711 ..."."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(line[1] == "->" and line[5] == str(process.pid) for line in lines)


def test_the_guard_removes_the_folder_when_the_last_process_that_uses_it_has_been_killed() -> None:
    folder = RunDir.create()
    rank = RunDir.join(folder.path)
    guard = folder.guard()
    try:
        os.close(folder._lock)  # as a SIGKILL does
        assert wait_until(lambda: waits_for_a_lock(guard))
        assert sweep() == []
        os.close(rank._lock)
        assert guard.wait(30) == 0
    finally:
        guard.kill()
        guard.wait()
    assert not folder.path.exists()


def test_the_guard_ends_when_the_folder_has_been_removed() -> None:
    folder = RunDir.create()
    guard = folder.guard()
    folder.remove()
    assert guard.wait(30) == 0


def test_a_sweep_takes_no_harm_from_a_folder_that_another_one_removes_meanwhile(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = base / f"mooncake-lite.{os.getuid()}.gone"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [gone])
    assert sweep() == []


def test_a_sweep_spares_what_somebody_uses_and_removes_what_nobody_does() -> None:
    used, forsaken = RunDir.create(), RunDir.create()
    os.close(forsaken._lock)  # as a SIGKILL does
    assert sweep() == [forsaken.path]
    assert used.path.exists()


def test_a_sweep_spares_a_folder_that_is_just_being_made_and_takes_an_old_one(base: Path) -> None:
    new = base / f"mooncake-lite.{os.getuid()}.new"
    old = base / f".mooncake-lite.{os.getuid()}.old"
    for folder in (new, old):
        folder.mkdir(mode=0o700)
    os.utime(old, (0, 0))
    assert sweep() == [old]


def test_a_sweep_leaves_other_users_folders_and_plain_files_alone(base: Path) -> None:
    other = base / f"mooncake-lite.{os.getuid() + 1}.abc"
    other.mkdir()
    os.utime(other, (0, 0))
    (base / f"mooncake-lite.{os.getuid()}.file").touch()
    assert sweep() == []


def test_a_sweep_takes_the_shared_memory_that_the_ranks_had_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    names = ["sm_segment.host.0.aa0001.0", "sm_segment.host.0.bb0001.0", "window"]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(
        "mooncake_lite.launch.processes.mapped_segments", lambda pid="self": [names[0], "window"]
    )
    folder = RunDir.create()
    RankFile(folder, 0, "steward").write("ready")
    os.close(folder._lock)
    sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_only_open_mpis_own_files_are_ever_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    outside = tmp_path.parent / "sm_segment.outside"
    outside.touch()
    (tmp_path / "precious").touch()
    remove_segments(["precious", "../sm_segment.outside", "sm_segment.none"])
    assert (tmp_path / "precious").exists()
    assert outside.exists()


def test_a_rank_file_tells_the_last_state_and_keeps_the_first_last_word() -> None:
    folder = RunDir.create()
    file = RankFile(folder, 2, "decode")
    file.write("starting", "compiling\nkernels")
    (state,) = folder.states().values()
    assert (state.name, state.state, state.reason) == ("rank 2 (decode)", "starting", "compiling kernels")
    assert state.pid == os.getpid()
    file.write("failed", "out of memory")
    file.write("stopped", "asked to")
    assert (folder.states()[2].state, folder.states()[2].reason) == ("failed", "out of memory")
    assert [path.name for path in folder.path.glob("*.tmp")] == []


def test_a_rank_file_that_is_not_readable_is_left_out() -> None:
    folder = RunDir.create()
    (folder.path / "rank-0.json").write_text("{")
    (folder.path / "rank-1.json").write_text('{"rank": "one"}')
    assert folder.states() == {}


def test_writing_a_rank_file_survives_the_end_of_the_folder() -> None:
    folder = RunDir.create()
    file = RankFile(folder, 0, "steward")
    folder.remove()
    file.write("stopped")
    assert not folder.path.exists()


def test_bases_are_the_runtime_folder_then_tmpdir_then_tmp(tmp_path: Path) -> None:
    program = "from mooncake_lite.launch.run_dir import bases; print(*bases())"
    printed = printed_by("-c", program, XDG_RUNTIME_DIR="relative", TMPDIR=str(tmp_path))
    assert printed.split() == [str(tmp_path), "/tmp"]
    assert bases()[-1] == Path("/tmp")


def test_a_rank_file_tells_how_far_compiling_is() -> None:
    folder = RunDir.create()
    process = SimpleNamespace(file=RankFile(folder, 2, "decode"))
    report = partial(RankProcess.compiling, process)
    report(2, 7, "linear layers")
    report(7, 7, "")
    (state,) = folder.states().values()
    assert (state.state, state.reason) == ("starting", "compiling kernels 3 of 7: linear layers")
    folder.leave()
