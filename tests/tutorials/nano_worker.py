"""Answers prompts with nano_mooncake.py: a program of its own, because it needs NumPy on one core per thread.

Reads {"prefills", "decodes", "pool_blocks", "waves": [[text]], "answer_tokens"} from standard input. The
prompts of a wave are submitted together. Writes {"requests": [[{"prompt", "answer", "cached"}]], "held":
[blocks of each thread], "threads": number of threads that are left at the end}.
"""

import json
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tutorials"))
from nano_mooncake import Mooncake


def answered(mooncake: Any, texts: list[str], answer_tokens: int) -> list[dict[str, Any]]:
    requests = [mooncake.submit(text, answer_tokens) for text in texts]
    mooncake.wait(lambda: all(request.ended(request.answer) for request in requests))
    return [{"prompt": one.prompt, "answer": one.answer, "cached": one.cached} for one in requests]


def main() -> None:
    task = json.load(sys.stdin)
    with closing(Mooncake(task["prefills"], task["decodes"], task["pool_blocks"])) as mooncake:
        requests = [answered(mooncake, texts, task["answer_tokens"]) for texts in task["waves"]]
    held = [len(thread.blocks) for thread in mooncake.threads]
    json.dump({"requests": requests, "held": held, "threads": threading.active_count() - 1}, sys.stdout)


if __name__ == "__main__":
    main()
