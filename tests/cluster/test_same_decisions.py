"""A live cluster and the simulator, with the same arrivals and the same profile, decide alike."""

from __future__ import annotations

import random
import time
from math import inf
from pathlib import Path
from random import Random

import httpx
import pytest

from mooncake_lite.conductor.recording import Recording
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.profiled import ProfiledHardware
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.tokens import Opaque
from mooncake_lite.simulator.workload import Request
from mooncake_lite.simulator.world import World
from store.allocator import padded_size
from tests import emulation

pytestmark = pytest.mark.cluster

ANSWER_TOKENS, GAP_S, SPACED_S = 8, 0.05, 10.0
"""In the simulator, requests come as far apart as they were live, in units of answers: none overlap."""


def prompts() -> list[list[int]]:
    """Conversations that share documents: some blocks are near, some far, some nowhere."""
    chosen = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [chosen.randrange(3, emulation.VOCABULARY) for _ in range(count)]

    documents = [tokens(64 * count) for count in (1, 3, 6, 9)]
    return [chosen.choice(documents) + tokens(chosen.randint(10, 200)) for _ in range(24)]


def decision(effect: fx.Decided) -> tuple[int, int, int]:
    return effect.prefill, effect.decode, effect.cached_tokens


def recorded(
    path: Path,
) -> tuple[ControlConfig, list[ev.RankJoined], list[ev.RequestArrived], list[fx.Decided]]:
    """What a live cluster was, which requests came, and what it decided."""
    recording = Recording(path)
    control, joined, arrived, decided = Control(recording.header.config), [], [], []
    for entry in recording.entries():
        joined += [entry.event] if isinstance(entry.event, ev.RankJoined) else []
        arrived += [entry.event] if isinstance(entry.event, ev.RequestArrived) else []
        decided += [one for one in control.on(entry.event, entry.now) if isinstance(one, fx.Decided)]
    recording.close()
    return recording.header.config, joined, arrived, decided


class Arrivals:
    """The requests of a recording. See simulator.workload.Source."""

    def __init__(self, arrived: list[ev.RequestArrived], block_tokens: int) -> None:
        self.num_requests = len(arrived)
        self._left, self._block_tokens = iter(arrived), block_tokens

    def next(self) -> Request:
        one = next(self._left)
        text = Opaque([*one.keys, *[0] * 4], self._block_tokens, one.num_tokens)
        return Request(
            one.request_id, text, one.keys, one.digests, one.max_tokens, ANSWER_TOKENS,
            wait_limit_s=inf, after_s=SPACED_S, class_id=one.class_id,
        )  # fmt: skip


def simulated(
    config: ControlConfig, joined: list[ev.RankJoined], arrived: list[ev.RequestArrived]
) -> list[fx.Decided]:
    """What the simulator decides about the same requests."""
    padded = padded_size(config.block_layout.nbytes)
    lent = {one.rank: one.segment_bytes // padded for one in joined}
    slots = max(one.slots for one in joined if "decode" in one.duties)
    shape = Shape(
        config=config, segments=[lent.get(rank, 0) for rank in range(len(config.roles))], slots=slots,
        prompts=1, pages=4096, page_tokens=16, budget=256, half_blocks=4, sharing="hash",
    )  # fmt: skip
    setting = Setting(
        shape=shape,
        hardware=lambda clock: ProfiledHardware(
            clock, emulation.COST.seconds, config.costs, config.nodes, OverheadsSection()
        ),
        source=Arrivals(arrived, config.block_layout.block_tokens), dice=Random(1),
    )  # fmt: skip
    found: list[fx.Decided] = []

    def observe(event: ev.Event, now: float, effects: object) -> None:
        found.extend(one for one in effects if isinstance(one, fx.Decided))  # type: ignore[attr-defined]

    World(setting, observe=observe).run()
    return found


@pytest.fixture(params=["round-robin", "kvcache-centric"])
def record(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The recording of a cluster that has served all prompts, one after the other."""
    folder = tmp_path
    model, path = emulation.model_folder(folder / "model"), folder / "record"
    flags = [
        *(str(model), "--engine", "emulated", "--profile", str(emulation.profile_file(model))),
        *("--prefill", "2", "--decode", "2", "--store", "2", "--pool-bytes", "4MiB"),
        *(
            "--staging-bytes",
            "1MiB",
            "--prefix-sharing",
            "hash",
            "--policy",
            request.param,
            "--record",
            str(path),
        ),
    ]
    with Cluster(flags, folder / "log") as cluster:
        cluster.wait_ready(120.0)
        with httpx.Client(timeout=60, trust_env=False) as http:
            for prompt in prompts():
                body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
                assert http.post(f"{cluster.base_url}/v1/completions", json=body).status_code == 200
                time.sleep(GAP_S)  # the last reports of a request come after its answer
    return path


def test_a_live_cluster_and_the_simulator_make_the_same_decisions(record: Path) -> None:
    config, joined, arrived, live = recorded(record)
    assert len(live) == len(arrived) == len(prompts())
    assert len({one.prefill for one in live}) == (2 if config.policy == "round-robin" else 1)
    assert sum(one.cached_tokens > 0 for one in live) > 10

    replayed = simulated(config, joined, arrived)
    for number, (one, other) in enumerate(zip(live, replayed, strict=True)):
        assert decision(one) == decision(other), f"decision {number}: {one} live, {other} simulated"
