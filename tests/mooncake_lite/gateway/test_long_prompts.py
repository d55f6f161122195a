"""Long bodies are handled in a separate process: same results, no delay for others, and it always ends.

A process that was suspended stands for one that works for a long time.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mooncake_lite import messages as m
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway import long_prompts
from mooncake_lite.gateway import prompts as prompts_module
from mooncake_lite.gateway.long_prompts import LongPrompts, command
from mooncake_lite.gateway.long_prompts_process import NICENESS
from mooncake_lite.gateway.problems import Broken, Refused
from mooncake_lite.gateway.prompts import MIDDLE_BYTES, SHORT_BYTES, Prompts
from mooncake_lite.gateway.settings import read_settings
from mooncake_lite.launch.child import start_child
from mooncake_lite.model.tokenizer import load_tokenizer
from tests.mooncake_lite.gateway.conftest import Spawn, Start
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, GatewayProcess, posted, write_settings
from tests.patience import wait_until

BODY = json.dumps({"prompt": "hello"}).encode()
JSON = {"Content-Type": "application/json"}
NAME = "mooncake_lite.gateway.long_prompts_process"
LONG_TEXT = "hello world " * (SHORT_BYTES // 10)


def children_of(pid: int) -> list[int]:
    """The processes for long prompts of a gateway, those included that have ended and are not reaped."""
    children = psutil.Process(pid).children()
    return [
        child.pid for child in children if child.status() == "zombie" or NAME in " ".join(child.cmdline())
    ]


def child_of(pid: int) -> int:
    """The only one."""
    (child,) = children_of(pid)
    return child


def assert_ends(pid: int) -> None:
    """Waits for the end of a process that is no child of this one, or is reaped elsewhere."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watched], [], [], LIMIT_S)[0], f"process {pid} stays"
    finally:
        os.close(watched)


Test = Callable[[LongPrompts], Coroutine[Any, Any, None]]


def with_process(run_dir: Path, test: Test, queue: int = 4, queue_bytes: int = 2**20) -> None:
    """Run a test with a process that has answered once."""

    async def run() -> None:
        long = LongPrompts(command(run_dir, MEMORY_BYTES), queue, queue_bytes)
        try:
            assert b"".join(await answer(long)) == b'{"prompt":"a"}'
            await test(long)
        finally:
            long.close()

    asyncio.run(run())
    assert children_of(os.getpid()) == []


async def answer(long: LongPrompts, blanks: int = 0) -> list[bytes]:
    reply = await long.do("detokenize", "", b'{"tokens": [%d]}' % A + b" " * blanks)
    assert isinstance(reply, list)
    return reply


MEMORY_BYTES = 2**26
A = 66
"""The id of "a" in the tokenizer of these tests."""


@pytest.fixture
def settings_dir(run_dir: Path, model_folder: Path) -> Path:
    write_settings(run_dir, model_folder)
    return run_dir


def test_a_body_has_the_same_result_in_a_thread_and_in_the_process(
    settings_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = read_settings(settings_dir)
    hello = [{"role": "user", "content": "hello"}]
    common = {"seed": 5, "stop": ["a", "b"], "stream": True, "cache_salt": "x", "temperature": 0.5}
    bodies: list[tuple[Any, Any]] = [
        ("chat", {"messages": hello, **common}),
        ("completion", {"prompt": "hello " * 20, "stream_options": {"include_usage": True}, **common}),
        ("completion", {"prompt": [5] * 200, **common}),
        ("completion", {"prompt": ["hello", "world"], "echo": True, "logprobs": 1, "n": 2, **common}),
        ("completion", {"prompt": "x", "model": "other"}),
        ("completion", {"prompt": [5, -1]}),
        ("completion", {"prompt": "hello " * 10_000}),
        ("chat", {"messages": [{"role": "tool"}]}),
        ("tokenize", {"messages": hello}),
        ("tokenize", {"prompt": "hello " * 100_000}),
        ("detokenize", {"tokens": [5, 6, 7]}),
        ("detokenize", [1]),
    ]

    async def results() -> list[Any]:
        prompts = Prompts(settings, load_tokenizer(settings.model_folder))
        try:
            return [await result(prompts, kind, json.dumps(body).encode()) for kind, body in bodies]
        finally:
            prompts.close()

    async def result(prompts: Prompts, kind: Any, raw: bytes) -> Any:
        try:
            if kind.endswith("tokenize"):
                return b"".join(await prompts.answer(kind, raw))
            return await prompts.prepare(kind, "r", raw)
        except RequestError as error:
            return vars(error)

    monkeypatch.setattr(prompts_module, "SHORT_BYTES", 10**9)
    here = asyncio.run(results())
    assert children_of(os.getpid()) == []
    monkeypatch.setattr(prompts_module, "SHORT_BYTES", 0)
    assert asyncio.run(results()) == here


def test_work_beyond_its_limit_is_ended_and_the_next_body_has_another_process(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        first = child_of(os.getpid())
        os.kill(first, signal.SIGSTOP)
        long.limit_s = 0.05
        with pytest.raises(RequestError, match=r"worked on for 0\.05 s, which is the limit") as caught:
            await answer(long)
        assert (caught.value.status, caught.value.code) == (400, "prompt_too_slow")
        long.limit_s = LIMIT_S
        await answer(long)
        assert_ends(first)

    with_process(settings_dir, test)


def test_a_process_that_dies_costs_one_request_and_says_why(
    settings_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(long: LongPrompts) -> None:
        pid = child_of(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        first, second = asyncio.create_task(answer(long)), asyncio.create_task(answer(long))
        await asyncio.sleep(0)  # the first one has been sent
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Broken, match="send the request again"):
            await first
        assert await second

    with_process(settings_dir, test)
    assert "the process for long prompts was killed by signal 9 (SIGKILL)" in capfd.readouterr().err


def test_a_process_that_dies_while_it_has_no_work_costs_nothing(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        pid = child_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await answer(long)

    with_process(settings_dir, test)


def test_the_work_for_a_client_that_leaves_is_ended_and_the_next_body_begins(
    settings_dir: Path,
) -> None:
    async def test(long: LongPrompts) -> None:
        pid = child_of(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        working, waiting, staying = (asyncio.create_task(answer(long)) for _ in range(3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert child_of(os.getpid()) == pid
        working.cancel()
        assert await staying

    with_process(settings_dir, test)


def test_a_process_that_holds_much_memory_after_its_work_is_not_kept(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        first = child_of(os.getpid())
        assert await answer(long)
        assert child_of(os.getpid()) == first
        long.keep_bytes = 1
        assert await answer(long)
        assert_ends(first)
        assert await answer(long)

    with_process(settings_dir, test)


def test_one_long_body_too_many_is_refused(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        os.kill(child_of(os.getpid()), signal.SIGSTOP)
        tasks = [asyncio.create_task(answer(long)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="2 long prompts are waiting"):
            await answer(long)
        os.kill(child_of(os.getpid()), signal.SIGCONT)
        assert all(await asyncio.gather(*tasks))
        assert await answer(long)

    with_process(settings_dir, test, queue=2)


def test_bytes_beyond_the_limit_of_the_queue_are_refused(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        os.kill(child_of(os.getpid()), signal.SIGSTOP)
        alone = asyncio.create_task(answer(long, blanks=2000))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match=r"bytes are waiting; .* exceed the limit of 1000"):
            await answer(long)
        os.kill(child_of(os.getpid()), signal.SIGCONT)
        assert await alone
        assert await answer(long)

    with_process(settings_dir, test, queue_bytes=1000)


@pytest.mark.parametrize(
    ("passed_over_s", "order"), [(3600.0, [300, 0, 100, 200]), (0.0, [300, 200, 100, 0])]
)
def test_the_shortest_body_is_next_unless_another_was_passed_over_for_too_long(
    settings_dir: Path, passed_over_s: float, order: list[int]
) -> None:
    async def test(long: LongPrompts) -> None:
        long.turns.passed_over_s = passed_over_s
        ended: list[int] = []

        async def ask(blanks: int) -> None:
            await answer(long, blanks)
            ended.append(blanks)

        await asyncio.gather(*map(ask, (300, 200, 100, 0)))
        assert ended == order

    with_process(settings_dir, test)


def test_a_wait_has_a_limit_and_says_when_to_come_back(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        os.kill(child_of(os.getpid()), signal.SIGSTOP)
        first = asyncio.create_task(answer(long))
        await asyncio.sleep(0)
        long.turns.wait_s = 0.05
        with pytest.raises(Refused, match=r"has waited 0\.05 s for others, which is the limit") as caught:
            await answer(long)
        assert caught.value.retry_after_s == 0.05
        os.kill(child_of(os.getpid()), signal.SIGCONT)
        assert await first
        assert await answer(long)

    with_process(settings_dir, test)


def test_a_process_whose_client_leaves_while_it_starts_works_on_the_next_body_and_is_ended(
    settings_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go = threading.Event(), threading.Event()
    started: list[int] = []

    def held(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.set()
        assert may_go.wait(LIMIT_S)
        process = start_child(*arguments, **options)
        started.append(process.pid)
        return process

    async def run() -> None:
        long = LongPrompts(command(settings_dir, MEMORY_BYTES), 1)
        task = asyncio.create_task(answer(long))
        try:
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            may_go.set()
            assert await answer(long)
            assert [child_of(os.getpid())] == started
        finally:
            may_go.set()
            long.close()

    monkeypatch.setattr(long_prompts, "start_child", held)
    asyncio.run(run())
    assert children_of(os.getpid()) == []


@pytest.mark.parametrize("body", [{"prompt": "hello " * 2**18}, {"prompt": [[5]] * 2**20}])
def test_work_that_takes_too_much_memory_is_refused(settings_dir: Path, body: dict[str, Any]) -> None:
    async def test(long: LongPrompts) -> None:
        raw = json.dumps(body).encode()
        with pytest.raises(RequestError, match=f"this body of {len(raw)} bytes needs more memory") as caught:
            await long.do("tokenize" if isinstance(body["prompt"], str) else "completion", "r", raw)
        assert (caught.value.status, caught.value.code) == (400, "prompt_too_large")
        assert await answer(long)

    with_process(settings_dir, test, queue_bytes=2**24)


def test_the_ranks_have_precedence_over_the_process(settings_dir: Path) -> None:
    async def test(long: LongPrompts) -> None:
        pid = child_of(os.getpid())
        assert os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS
        autogroup = Path(f"/proc/{pid}/autogroup")
        if autogroup.exists():  # among sessions, that of the session counts
            assert autogroup.read_text().split()[-1] == str(NICENESS)

    with_process(settings_dir, test)


def test_a_process_that_cannot_start_is_an_error_for_its_request(
    settings_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (settings_dir / "gateway.json").unlink()

    async def run() -> None:
        long = LongPrompts(command(settings_dir, MEMORY_BYTES), 1)
        with pytest.raises(Broken):
            await answer(long)
        long.close()

    asyncio.run(run())
    assert "gateway.json cannot be read" in capfd.readouterr().err


def tokenize(gateway: GatewayProcess, text: str) -> dict[str, Any]:
    reply = gateway.http.post("/tokenize", json={"prompt": text})
    assert reply.status_code == 200
    return dict(reply.json())


@contextmanager
def in_work(gateway: GatewayProcess, path: str, text: str) -> Iterator[tuple[int, Future[httpx.Response]]]:
    """While a suspended process has a long body: (the process, the reply to come)."""
    tokenize(gateway, text)
    child = child_of(gateway.process.pid)
    os.kill(child, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        yield child, pool.submit(gateway.http.post, path, json={"prompt": text})


def test_others_are_served_while_a_long_body_is_worked_on(spawn: Spawn) -> None:
    gateway, _ = spawn()
    with in_work(gateway, "/tokenize", LONG_TEXT) as (child, reply):
        for _ in range(3):
            assert gateway.http.post("/v1/completions", content=BODY, headers=JSON).status_code == 200
            assert not reply.done()
        os.kill(child, signal.SIGCONT)
        found = reply.result().json()

    tokens = tokenize(gateway, "hello world ")["tokens"]
    assert found["count"] == len(found["tokens"]) > SHORT_BYTES // 10
    assert found["tokens"][: len(tokens) - 1] == tokens[:-1]
    gateway.close()
    assert_ends(child)


def test_a_prompt_of_mean_length_does_not_wait_behind_a_very_long_one(spawn: Spawn) -> None:
    gateway, _ = spawn()
    with in_work(gateway, "/tokenize", "hello world " * (MIDDLE_BYTES // 10)) as (child, reply):
        assert tokenize(gateway, LONG_TEXT)["count"] > 0
        assert not reply.done()
        os.kill(child, signal.SIGCONT)
        assert reply.result().json()["count"] > 0


def test_a_long_body_is_admitted_before_it_is_worked_on_and_gives_its_place_back(start: Start) -> None:
    gateway, cluster = start({"open_requests": 1})
    for _ in range(2):
        reply = gateway.http.post("/v1/completions", json={"prompt": LONG_TEXT})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert gateway.http.post("/v1/completions", content=BODY, headers=JSON).status_code == 200
    assert len(cluster.all_of(m.Submit)) == 1


def test_the_process_does_not_outlive_a_gateway_that_is_killed(spawn: Spawn) -> None:
    gateway, _ = spawn()
    tokenize(gateway, LONG_TEXT)
    child = child_of(gateway.process.pid)
    gateway.process.kill()
    gateway.process.communicate(timeout=LIMIT_S)
    assert_ends(child)


def test_no_process_stays_of_a_gateway_that_is_killed_when_it_starts_one(spawn: Spawn) -> None:
    gateway, _ = spawn()
    body = json.dumps({"prompt": LONG_TEXT}).encode()
    with gateway.connect() as client:
        client.sendall(posted("/tokenize", body))
        gateway_process = psutil.Process(gateway.process.pid)
        while not (children := gateway_process.children()):
            pass
        gateway.process.kill()
        gateway.process.communicate(timeout=LIMIT_S)
    for child in children:
        assert_ends(child.pid)


def test_a_client_whose_long_body_is_in_work_hears_that_the_service_is_stopping(spawn: Spawn) -> None:
    gateway, _ = spawn()
    with in_work(gateway, "/v1/completions", LONG_TEXT) as (child, reply):
        assert wait_until(lambda: "open_requests 1.0" in gateway.http.get("/metrics").text, LIMIT_S)
        gateway.process.terminate()

    assert reply.result().status_code == 503
    assert reply.result().json()["error"]["message"].startswith("the service is stopping")
    assert_ends(child)
    assert gateway.finish() == (0, "")
