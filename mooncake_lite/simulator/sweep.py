"""Sweeps: every combination of some options of `simulate cluster`, for several seeds, in parallel.

Called by `sweep_command.py`. A file says what is varied:

    trace = "conversation_trace.jsonl"      # beside the file
    seeds = [1, 2, 3]                       # [0] unless given
    [cluster]                               # options of `simulate cluster`
    nodes = "8P8D"
    [vary]                                  # every combination of these is played
    policy = ["random", "kvcache-centric"]
    link-gbps = [24, 100]

Results do not depend on the number of processes. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import ClusterError, ConfigError
from mooncake_lite.simulator.cluster_command import cluster, cluster_of, requests_of, source_of
from mooncake_lite.simulator.play import play
from transport.threads import start_thread

MOST_RUNS = 10_000
NO_OPTIONS = ("--json", "--plot", "--seed", "--runs", "--kill")
"""Options of `simulate cluster` that a file may not set: they are about one run."""

Value = str | int | float | bool


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What a file says; see above."""

    trace: str
    vary: dict[str, list[Value]]
    cluster: dict[str, Value] = {}
    seeds: list[int] = msgspec.field(default_factory=lambda: [0])


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be played: for each combination its values, and the parameters of each of its runs."""

    names: list[str]
    rows: list[tuple[tuple[Value, ...], list[dict[str, Any]]]]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Return the parameters of all runs, row by row."""
        return [run for _, runs in self.rows for run in runs]


def read_sweep(path: Path, trace: Path | None = None) -> Sweep:
    """Read a file, and check every run that it asks for. Raises ConfigError or TraceError.

    trace   to be played in place of the one that the file names
    """
    try:
        said = msgspec.convert(tomllib.loads(plain_text(path.read_bytes()).decode()), _File)
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    count = len(said.seeds)
    for name, values in said.vary.items():
        count *= len(values)
        if not values or name in said.cluster:
            raise ConfigError(f"{path}: give values to {name}, either in [cluster] or, several, in [vary]")
    if not said.vary or not 0 < count <= MOST_RUNS:
        raise ConfigError(f"{path}: {count:,} runs; vary something, in at most {MOST_RUNS:,} runs")
    rows, played = [], trace or path.parent / said.trace
    for chosen in itertools.product(*said.vary.values()):
        options = {**said.cluster, **dict(zip(said.vary, chosen))}
        rows.append((chosen, [_parsed(path, played, options, seed) for seed in said.seeds]))
    for _, (run, *_) in rows:
        cluster_of(requests_of(run["trace"], run), run)
    return Sweep(list(said.vary), rows)


def _parsed(path: Path, trace: Path, options: dict[str, Value], seed: int) -> dict[str, Any]:
    """Return the parameters of a run, as the command itself would parse them."""
    words = [str(trace), "--seed", str(seed)]
    for name, value in options.items():
        flag = f"--{name}"
        if flag in NO_OPTIONS:
            raise ConfigError(f"{path}: {name} is no option of a sweep")
        option = next((one for one in cluster.params if flag in one.opts), None)
        if value is False and isinstance(option, click.Option) and option.is_flag:
            words += option.secondary_opts  # most flags have no such half: left out, they are false
        else:
            words += [flag] if value is True else [flag, str(value)]
    try:
        return cluster.make_context("cluster", words).params
    except click.ClickException as error:
        raise ConfigError(f"{path}: {error.format_message()}") from None


def run_one(words: dict[str, Any]) -> dict[str, Any]:
    """Play one run, in any process. Returns what the JSON of `simulate cluster` has, without the loads."""
    requests = requests_of(words["trace"], words)
    chosen = cluster_of(requests, words)
    outcome = play(chosen, source_of(requests, words), words["seed"])
    result = outcome.to_dict(chosen.ttft_s, chosen.tbt_s)
    del result["loads"]
    return result


@contextmanager
def processes(jobs: int, *, mpi: bool) -> Iterator[Executor]:
    """Give an executor: `jobs` processes of this host, or the other ranks of an mpirun.

    Processes of this host hear no Ctrl-C, and end where this one is interrupted, fails or is killed.
    """
    executor: Executor
    if mpi:
        from mpi4py.futures import MPIPoolExecutor

        executor = MPIPoolExecutor()
    else:
        executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        if not mpi:
            _start_all(executor, jobs)
        yield executor
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _start_all(executor: Executor, jobs: int) -> None:
    """Start all processes of `executor`, which inherit that Ctrl-C is blocked. It counts afterwards.

    Blocking is not enough here: a library's thread takes the signal, and Python handles it in this one.
    A child whose start is interrupted would print a traceback.
    """
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for _ in range(jobs):
            executor.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Have this process end with the one that started it, also where that one is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    start_thread("parent", watch)


def play_sweep(sweep: Sweep, executor: Executor, told: Callable[[], None]) -> list[list[dict[str, Any]]]:
    """Play all runs. Returns the results of each row; Ctrl-C leaves out those that have not ended."""
    places = [(row, n) for row, (_, runs) in enumerate(sweep.rows) for n in range(len(runs))]
    futures: dict[Future[dict[str, Any]], tuple[int, int]] = {}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for place, run in zip(places, sweep.runs):
            futures[executor.submit(run_one, run)] = place
        for future in as_completed(futures):
            row, _ = place = futures[future]
            try:
                found[place] = future.result()
            except ClusterError as error:
                chosen = ", ".join(f"{name} {value}" for name, value in zip(sweep.names, sweep.rows[row][0]))
                raise ClusterError(f"{chosen}: {error}") from None
            told()
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.terminate()
    return [
        [found[place] for place in places if place[0] == row and place in found]
        for row in range(len(sweep.rows))
    ]
