"""A cluster as a child process, with small programs in place of the server: waiting, dying, stopping."""

import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import Cluster, _health

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        ready = Handler.asked > 2
        body = json.dumps({"detail": f"asked {Handler.asked}"}).encode()
        self.send_response(200 if ready else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
assert sys.argv[1:4] == ["--flag", "--host", "127.0.0.1"], sys.argv
http.server.HTTPServer(("127.0.0.1", int(sys.argv[5])), Handler).serve_forever()
"""


def cluster(tmp_path: Path, program: str) -> Cluster:
    return Cluster(["--flag"], tmp_path / "log", program=(sys.executable, "-c", program))


def test_a_cluster_is_ready_when_health_says_so_and_tells_what_it_waits_for(tmp_path: Path) -> None:
    told: list[str] = []
    with cluster(tmp_path, SERVER) as running:
        seconds = running.wait_ready(20.0, told.append)

    assert seconds < 20
    assert told == ["asked 1", "asked 2"]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (503, b'{"detail": "loading"}', (False, "loading")),
        (200, b"<html>another server</html>", (True, "")),
        (200, b"[]", (True, "")),
    ],
)
def test_what_another_server_says_is_no_detail(status: int, body: bytes, expected: tuple[bool, str]) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    with httpx.Client(transport=answer) as client:
        assert _health(client, "http://127.0.0.1:1") == expected


def test_a_cluster_that_ends_at_its_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('starting'); sys.exit('the port 8000 is taken')"
    with (
        cluster(tmp_path, program) as running,
        pytest.raises(ClusterError, match="exit code 1: the port 8000 is taken"),
    ):
        running.wait_ready(20.0)


def test_a_cluster_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with (
        cluster(tmp_path, "import time; time.sleep(60)") as running,
        pytest.raises(ClusterError, match="not ready within 0 s; its last words: nothing"),
    ):
        running.wait_ready(0.2)


def test_the_child_is_gone_after_an_error_in_the_middle(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail() -> None:
        with cluster(tmp_path, "import time; time.sleep(60)") as running:
            assert running._process is not None
            pids.append(running._process.pid)
            raise ValueError

    with pytest.raises(ValueError):
        fail()

    assert not os.path.exists(f"/proc/{pids[0]}")


def test_a_child_that_ignores_the_signal_is_killed_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_lite.launch.serve_child.STOP_LIMIT_S", 0.3)
    up = tmp_path / "up"
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(up)!r}, 'w').close(); time.sleep(60)"
    )
    with cluster(tmp_path, program) as running:
        end = time.monotonic() + 20
        while not up.exists() and time.monotonic() < end:
            pass
        seconds = running.stop()

    assert 0.3 <= seconds < 5
    assert running.stop() == 0.0
