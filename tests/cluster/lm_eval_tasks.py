"""Three small tasks for lm-eval, one of each kind of request that it makes, and a recorder of requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = [
    ("The capital of France is", [" Paris", " a banana", " seventeen"], 0),
    ("Two plus two is equal to", [" the sea", " four", " a long and winding road"], 1),
    ("The sun rises in the", [" keyboard", " spoon", " east"], 2),
    ("Cats and dogs are", [" animals", " prime numbers"], 0),
    ("Water freezes at a temperature of zero degrees", [" Celsius", " guitar"], 0),
]
BEGINNINGS = ["Count with me: one, two, three,", "Once upon a time, there was a", "The opposite of hot is"]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "To be, or not to be, that is the question."]

COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
metadata:
  version: 1
"""

TASKS = {
    "choices": """
task: ml_choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "generate": """
task: ml_generate
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs:
  until: ["\\n", ".", "six", "!"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
    "rolling": """
task: ml_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
""",
}


def write_tasks(folder: Path) -> list[str]:
    """Write the tasks and their data into a folder. Returns their names."""
    rows: dict[str, list[dict[str, Any]]] = {
        "choices": [
            {"question": question, "choices": choices, "answer": answer}
            for question, choices, answer in QUESTIONS
        ],
        "generate": [{"text": text} for text in BEGINNINGS],
        "rolling": [{"text": text} for text in TEXTS],
    }
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(task.lstrip() + COMMON.lstrip().format(data=data))
    return [f"ml_{name}" for name in TASKS]


@contextmanager
def recorder(url: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that passes POST requests on to `url`. Yields its own URL, and the bodies so far."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(json.loads(raw))
            headers = {"Content-Type": self.headers["Content-Type"]}
            reply = httpx.post(url + self.path, content=raw, headers=headers, timeout=120, trust_env=False)
            self.send_response(reply.status_code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
