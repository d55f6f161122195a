"""Question 3: how late decisions are when a live conductor is asked ten thousand times a second."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zmq

from mooncake_lite import messages as m
from mooncake_lite.conductor.loop import ConductorRole
from mooncake_lite.conductor.machine import Observer
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from questions.frame import SEEDS, Found, Point, Rows, table
from store.layout import BlockLayout
from transport.channel import Hub
from transport.wire import Decoder, encode

RATES, INSTANCES = (250, 1000, 2500, 10_000), (4, 64, 512)
SECONDS, PROMPTS, DOCUMENTS, BLOCKS, BLOCK_TOKENS = 4.0, 3000, 200, 16, 64
DECODE_S, BUSY, READY_S = 0.2, 0.5, 120.0
LAYOUT = BlockLayout(2, 1, BLOCK_TOKENS, 8, 4)
ID = "{:017.6f}"


def points(quick: bool) -> list[Point]:
    """Return rates of requests, and numbers of instances at the highest rate. All measure time."""
    chosen = [(INSTANCES[1], rate) for rate in RATES] + [(n, RATES[-1]) for n in (INSTANCES[0], INSTANCES[2])]
    found = [
        {"instances": instances, "rate": rate, "seed": seed, "alone": True}
        for (instances, rate), seed in product(chosen, SEEDS)
    ]
    return found[:1] if quick else found


class Answering(Hub):
    """The conductor's hub. Messages to ranks are encoded, and answered as ranks do that are half busy.

    prefill_s   after which a prefill rank says that it has computed a prompt
    reads       whether it reads its sockets
    """

    prefill_s, reads = 0.0, True

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.due: list[tuple[float, int, str, m.Message]] = []
        self._count = 0

    def send(self, peer: str, message: m.Message) -> bool:
        """Encode a message; answer it in place of a rank."""
        if not peer.startswith("rank-"):
            return peer == "steward" or super().send(peer, message)
        encode(message, self._max_send_bytes)
        order = message.order if isinstance(message, m.Start) else None
        if order is not None:
            about = order.rank, 0, order.request_id, order.attempt
        if isinstance(order, fx.StartPrefill):
            ended = ev.PrefillEnded(*about, [[1, 2]] * len(order.store), [], 0.0, self.prefill_s, 0.0)
            self._later(self.prefill_s, peer, m.Report(ended, [[7]]))
        elif isinstance(order, fx.StartDecode):
            self._later(0.0, peer, ev.DecodeLoaded(*about))
            self._later(DECODE_S, "gateway-0", ev.AnswerReceived(order.request_id, 0))
            self._later(DECODE_S, peer, ev.DecodeEnded(*about))
        return True

    def _later(self, after_s: float, peer: str, message: m.Message) -> None:
        self._count += 1
        heappush(self.due, (time.monotonic() + after_s, self._count, peer, message))

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Return what has come, and the answers that are due."""
        now, found = time.monotonic(), list[tuple[str, Any]]()
        if self.due:
            timeout_s = min(timeout_s, max(0.0, self.due[0][0] - now))
        while self.due and self.due[0][0] <= now:
            found.append(heappop(self.due)[2:])
        return found + (super().receive(0.0 if found else timeout_s) if self.reads else [])


class Watch(Observer):
    """Notes how late requests were read, whose ids are the times at which they were due, and how many ended.

    collector_s   CPU time of each full run of Python's collector
    """

    def __init__(self) -> None:
        self.late_s, self.ended, self.collector_s, self._began_s = list[float](), 0, list[float](), 0.0

    def on(self, event: ev.Event, effects: Sequence[fx.Effect], now: float) -> None:
        """See an event."""
        if isinstance(event, ev.RequestArrived):
            self.late_s.append(now - float(event.request_id))
        self.ended += isinstance(event, ev.DecodeEnded)

    def collects(self, phase: str, about: dict[str, int]) -> None:
        """See the collector begin or end."""
        if phase == "start":
            self._began_s = time.thread_time()
        elif about["generation"] == 2:
            self.collector_s.append(time.thread_time() - self._began_s)


def conduct(endpoint: str, instances: int, rate: float, pipe: Connection) -> None:
    """Run a conductor until the driver says how many requests it has sent and its time is over."""
    config = ServeConfig(
        prefill=instances, decode=instances, store=instances, block_size=BLOCK_TOKENS, max_queue=10**6,
        max_num_seqs=10**5, admission="none",
    )  # fmt: skip
    hub = Answering([endpoint], Decoder(m.TO_CONDUCTOR))
    hub.prefill_s = BUSY * instances / rate
    nodes = [0, *[rank % instances for rank in range(3 * instances)]]
    role, watch, taken = (
        ConductorRole(config, hub, control_config(config, LAYOUT, nodes)),
        Watch(),
        list[float](),
    )
    segment = 4 * (PROMPTS + DOCUMENTS) * BLOCKS * LAYOUT.nbytes // instances
    role.step([("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens", "tcp://127.0.0.1:1"]))])
    for rank, name in enumerate(config.roles[1:], 1):
        role.step([(f"rank-{rank}", m.RankHello(rank, name, nodes[rank], segment if name == "store" else 0))])
    role.machine.metrics.observe_decision = taken.append  # type: ignore[method-assign]
    choose, cpu = role.control.dispatcher.choose, list[float]()

    def timed(*about: Any) -> Any:
        began_s = time.thread_time()
        decision = choose(*about)
        cpu.append(time.thread_time() - began_s)
        return decision

    role.control.dispatcher.choose = timed
    role.machine.observers.append(watch)  # type: ignore[attr-defined]
    gc.callbacks.append(watch.collects)
    pipe.send(role.machine.ready)
    began_s = time.process_time()
    while not pipe.poll():
        role.step(hub.receive(0.01))
    hub.reads, read = False, len(watch.late_s)
    while hub.due:
        time.sleep(max(0.0, hub.due[0][0] - time.monotonic()))
        role.step(hub.receive(0.0))
    cpu_s, stops_s = time.process_time() - began_s, max(watch.collector_s, default=0.0)
    pipe.send((taken, cpu, watch.late_s, cpu_s, watch.ended / read, stops_s))
    hub.close()


def run(point: Point) -> Found:
    """Send requests to a conductor process. Returns its times of decisions, and the rate that it took."""
    rate, made, empty = point["rate"], _submits(point["seed"]), ID.format(0.0).encode()
    ours, theirs = get_context("spawn").Pipe()
    with TemporaryDirectory(prefix="mooncake-lite-question-") as place, zmq.Context() as context:
        about = f"ipc://{place}/hub", point["instances"], rate, theirs
        child = get_context("spawn").Process(target=conduct, args=about)
        child.start()
        if not (ours.poll(READY_S) and ours.recv()):
            raise TimeoutError("the conductor is not ready")
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt_string(zmq.IDENTITY, "gateway-0")
            socket.connect(about[0])
            began, sent = time.monotonic() + 0.2, 0
            while (now := time.monotonic()) < began + SECONDS:
                due = began + sent / rate
                if now < due or not socket.poll(1, zmq.POLLOUT):
                    time.sleep(min(0.001, max(0.0, due - now)))
                    continue
                socket.send(made[sent % PROMPTS].replace(empty, ID.format(due).encode()))
                sent += 1
            ours.send(None)
            taken, cpu, late_s, cpu_s, ended, stops_s = ours.recv()
        child.join()
    return {
        "sent": sent / SECONDS, "taken": len(late_s) / SECONDS, "late_ms": _spread(late_s, 1e3),
        "choose_us": _spread(taken, 1e6), "choose_cpu_us": _spread(cpu, 1e6),
        "load": os.getloadavg()[0], "choosing": sum(cpu) / cpu_s, "cpu_us": 1e6 * cpu_s / len(late_s),
        "ended": ended, "collector_ms": 1000 * stops_s,
    }  # fmt: skip


def _spread(values_s: list[float], unit: float) -> dict[str, float]:
    p50, p99, most = np.percentile(values_s, (50, 99, 100)) * unit
    return {"p50": float(p50), "p99": float(p99), "max": float(most)}


def _submits(seed: int) -> list[bytes]:
    """Return encoded requests, whose ids are to be replaced. A prompt begins with one of the documents."""
    dice, half = Random(f"{seed}"), BLOCKS // 2

    def keys() -> list[int]:
        return [dice.getrandbits(63) for _ in range(half)]

    documents, tokens = [keys() for _ in range(DOCUMENTS)], [*range(BLOCKS * BLOCK_TOKENS + 10)]
    found = []
    for _ in range(PROMPTS):
        prompt = dice.choice(documents) + keys()
        asked = ev.RequestArrived(ID.format(0.0), len(tokens), 16, prompt, prompt, gateway="gateway-0")
        found.append(encode(m.Submit(asked, m.Body("gateway-0", tokens, b"model", m.Sampling(0.0), [0]))))
    return found


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page. Times are those of one machine, so only shares have a range."""
    found, lines = dict[str, Any](), []
    for instances, rate in dict.fromkeys((point["instances"], point["rate"]) for point, _ in rows):
        about, name = {"instances": instances, "rate": rate}, f"{instances}_{rate}"
        paths = {
            "sent": "sent", "read": "taken", "median": "choose_cpu_us.p50", "own": "choose_cpu_us.p99",
            "clock": "choose_us.p99", "late": "late_ms.p99", "cpu": "cpu_us",
            "collector": "collector_ms",
        }  # fmt: skip
        of = {what: rows.seeds(path, **about).middle for what, path in paths.items()}
        found |= {f"{what}_{name}": one for what, one in of.items()} | {f"most_{name}": 1e6 / of["cpu"]}
        found[f"choosing_{name}"] = rows.seeds("choosing", **about)
        cells = [
            f"{of['sent']:,.0f}",
            f"{of['read']:,.0f}",
            *(f"{of[one]:,.0f} us" for one in ("median", "own", "clock")),
        ]
        lines.append([f"{instances}", f"{rate:,}", *cells, f"{of['late']:,.0f} ms", f"{of['cpu']:,.0f} us"])
    in_time = [rate for rate in RATES if found[f"read_64_{rate}"] > 0.95 * rate]
    heads = [
        "instances",
        "asked/s",
        "sent/s",
        "read/s",
        "decision",
        "P99",
        "P99 by clock",
        "late P99",
        "CPU/request",
    ]
    return found | {
        "table": table(heads, lines), "rate": RATES[-1], "holds": max(in_time, default=0), "seconds": SECONDS,
        "collector": max(found[f"collector_64_{rate}"] for rate in RATES), "prompts": PROMPTS,
        "tokens": BLOCKS * BLOCK_TOKENS, "decode_s": DECODE_S, "seeds": len(SEEDS),
        "ended": min(found["ended"] for _, found in rows),
        "conductors": RATES[-1] / found["most_64_10000"], "load": median(found["load"] for _, found in rows),
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on. A machine with other work must not change them."""
    return {
        "one conductor does not take it": of["read_64_10000"] < 0.6 * of["rate"],
        "not even with a core of its own": of["most_64_10000"] < 0.8 * of["rate"],
        "decisions are the smaller part of the time": max(of["choosing_64_10000"]) < 0.25,
        "a late decision is early enough for a prefill": of["own_64_10000"] < 20_000,
        "rates do not make decisions dearer": of["median_64_10000"] < 1.5 * of["median_64_250"],
        "at low rates it keeps up by the clock": of["holds"] > 0,
        "the socket holds the sender back": of["sent_64_10000"] < 0.8 * of["rate"],
        "all requests that were read have ended": of["ended"] == 1,
        "the turn is within the sweep": of["holds"] < of["rate"],
        "the collector stops it for longer than any percentile": 1000 * of["collector"]
        > 10 * of["own_64_10000"],
        "many instances make it little dearer": of["cpu_512_10000"] < 4 * of["cpu_4_10000"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw what a conductor reads, and what a core of its own would take, by what it is asked."""
    asked = rows.of(instances=INSTANCES[1])
    read = [asked.seeds("taken", rate=rate).middle for rate in RATES]
    most = [1e6 / asked.seeds("cpu_us", rate=rate).middle for rate in RATES]
    axes.plot(RATES, RATES, "k:", label="asked")
    axes.plot(RATES, most, "C0s--", label="1 / CPU time of a request")
    axes.plot(RATES, read, "C1o-", label="read on this machine")
    axes.set(xscale="log", yscale="log", xlabel="requests asked per second", ylabel="requests per second")
    axes.legend()
