"""The store between two hosts: keys, and bytes over TCP."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.store.distributed.running import ENVIRONMENT, LIMIT_S, ROOT, heard
from tests.store.distributed.test_processes import CLIENT, say_to
from tests.two_nodes import two_nodes


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
            address = heard(master).split()[3].rstrip(",")
            lender = start(0, "-c", CLIENT, address, str(64 << 20))
            assert heard(lender) == "0"
            other = start(1, "-c", CLIENT, address, "0")
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
