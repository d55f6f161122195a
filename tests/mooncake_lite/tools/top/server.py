"""A server that answers `/metrics` as a test says, on a thread and a free port of loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """What was asked, and what is answered: each of `answers` once, the last one again and again."""

    answers: list[Answer]
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(
            {"path": handler.path, **{name.lower(): value for name, value in handler.headers.items()}}
        )
        self.answers[min(len(self.asked), len(self.answers)) - 1](handler)


def text(body: str | bytes, status: int = 200, **headers: str) -> Answer:
    """An answer with this body."""
    data = body.encode() if isinstance(body, str) else body

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return send


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """No answer: the connection ends."""
    handler.close_connection = True
    handler.connection.close()


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    """A server that gives these answers, one after the other."""
    server = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
