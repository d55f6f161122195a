"""The store between two hosts, and between two containers of one: keys, and bytes over TCP."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.store.mooncake_store.running import (
    ENVIRONMENT,
    LIMIT_S,
    ROOT,
    address,
    heard,
    master_thread,
    new_store,
)
from tests.store.mooncake_store.test_processes import CLIENT, say_to
from tests.two_nodes import two_nodes
from transport.messaging.curve import CurveKeys


def test_objects_cross_from_one_host_to_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    environment = {**ENVIRONMENT, "MOONCAKE_LITE_STORE_KEYS": str(keys), "MOONCAKE_LITE_STORE_PATH": "tcp"}
    started: list[subprocess.Popen[str]] = []
    with two_nodes(tmp_path) as nodes:

        def start(node: int, *line: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*nodes.on(node), sys.executable, "-u", *line],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            started.append(process)
            return process

        try:
            host = nodes.addresses[0]
            options = ("--rpc-port", "0", "--host", host, "--key-file", str(keys))
            master = start(0, "-m", "mooncake_lite", "store", "master", *options)
            where = heard(master).split()[3].rstrip(",")
            lender = start(0, "-c", CLIENT, where, str(64 << 20))
            assert heard(lender) == "0"
            other = start(1, "-c", CLIENT, where, "0")
            assert heard(other) == "0"
            assert say_to(other, "store.put('far', bytes(range(256)) * 20000)") == "0"
            assert say_to(lender, "store.get('far') == bytes(range(256)) * 20000") == "True"
            assert say_to(lender, "store.put('near', b'near')") == "0"
            assert say_to(other, "store.get('near')") == "b'near'"
            assert say_to(lender, "store.remove('near')") == "-706"
            lender.kill()
            lender.wait(LIMIT_S)
            assert say_to(other, "store.get('far')") == "b''"
            master.send_signal(signal.SIGTERM)
            assert master.wait(LIMIT_S) == 0
        finally:
            for process in started:
                process.kill()
                process.wait(LIMIT_S)
                process.stdin.close()  # type: ignore[union-attr]
                process.stdout.close()  # type: ignore[union-attr]


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A PID namespace of its own, in which the program is process 1."""


def test_clients_in_two_containers_of_a_host_are_not_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master must not watch its own process 1, nor a reader open the files of its own."""
    try:
        subprocess.run([*IN_A_CONTAINER, "true"], check=True, capture_output=True, timeout=LIMIT_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no PID namespace can be made here")
    keys = tmp_path / "keys"

    def start(stack: ExitStack, master: str, nbytes: int, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*IN_A_CONTAINER, sys.executable, "-u", "-c", CLIENT, master, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, **variables},
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        curve = CurveKeys.generate()
        keys.write_bytes(curve.to_bytes())
        monkeypatch.setattr("store.mooncake_store.master.master.SILENT_NS", 2 * 10**9)
        books = stack.enter_context(master_thread(curve=curve))
        master = address(books)
        first = start(stack, master, 64 << 20, MOONCAKE_LITE_STORE_KEYS=str(keys))
        second = start(stack, master, 64 << 20, MOONCAKE_LITE_STORE_KEYS=str(keys))
        assert [heard(first), heard(second)] == ["0", "0"]
        assert say_to(first, "__import__('os').getpid()") == "1"
        names = [f"k{number}" for number in range(8)]
        for process in (first, second):
            assert say_to(process, "store._client._keeper.is_alive(), store.health_check()") == "(True, 0)"
        assert say_to(first, f"store.put_batch({names}, [b'1' * 5000] * 8)") == "0"
        assert say_to(second, f"store.get_batch({names}) == [b'1' * 5000] * 8") == "True"
        monkeypatch.setenv("MOONCAKE_LITE_STORE_KEYS", str(keys))
        outside = new_store(master, 0)
        assert outside.get_batch(names) == [b"1" * 5000] * 8
        outside.close()
        first.kill()
        assert wait_until(lambda: books.stats()["clients"] == 1), "process 1 of the host lives on"
        assert say_to(second, "store.health_check()") == "0"
        stranger = start(stack, address(stack.enter_context(master_thread())), 0)
        assert heard(stranger) == "-600", "without keys it would have to read the master's memory"
