"""Lab 2 at work: questions about one document, and a trace, with the pages, keys and policy of a tree.

Run by `mooncake-lite labs run 2`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mooncake_lite import LLM, SamplingParams
from mooncake_lite.simulator.replay import replay, workload_of
from mooncake_lite.tools.demo.document import document_text
from mooncake_lite.workloads.traces import read_trace
from store.policies import policy_factory

WORDS = 300
"""Of the document: long enough that computing it takes longer than an answer."""
ANSWER_TOKENS = 24
QUESTIONS = {
    "first question": "What does Mooncake keep?",
    "second question": "Who uses Mooncake?",
    "second question again": "Who uses Mooncake?",
}


def asked(llm: LLM, what: str, question: str, **params: Any) -> dict[str, Any]:
    """Ask one question about the document."""
    document = " ".join(document_text().split()[:WORDS])
    began = time.perf_counter()
    (output,) = llm.generate(
        f"{document}\n\nQuestion: {question}\nAnswer:",
        SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, **params),
    )
    return {
        "what": what,
        "tokens": [token for each in output.outputs for token in each.token_ids],
        "reused": output.num_cached_tokens,
        "seconds": time.perf_counter() - began,
        "said": output.outputs[0].text,
    }


def replayed(trace: Path, blocks: int) -> dict[str, Any]:
    """Replay the trace of the class against SIEVE."""
    workload = workload_of(read_trace(trace))
    seen = replay(workload, policy_factory("sieve")(blocks), blocks)
    return {
        "what": f"trace, SIEVE with {blocks} blocks: hits",
        "tokens": [seen.misses, seen.evictions],
        "reused": seen.hits,
        "seconds": None,
        "said": "",
        "kind": "counts",
        "how": "counted",
        "gain": f"SIEVE finds {seen.hits / workload.references:.1%} of the blocks of your trace in the pool",
    }


def main() -> None:
    """Play everything."""
    model, data, sizes = sys.argv[1:]
    seen = [replayed(Path(data) / "trace.jsonl", json.loads(sizes)["pool_blocks"])]
    print(json.dumps(seen + (answers(model) if model != "-" else [])))


def answers(model: str) -> list[dict[str, Any]]:
    """Ask all questions, and say what the prefix of the second one is worth."""
    llm = LLM(*([model] if model else []), kv_cache_bytes="512MiB")
    llm.generate("Good morning", SamplingParams(max_tokens=2))  # the first call of a process takes longer
    seen = [asked(llm, what, question, temperature=0) for what, question in QUESTIONS.items()]
    seen.append(
        asked(llm, "four answers at once", QUESTIONS["second question"], n=4, seed=1, temperature=1.0)
    )
    first, second = seen[:2]
    second["gain"] = (
        f"the second question reuses {second['reused']} tokens of the first one's prompt and takes "
        f"{second['seconds'] / first['seconds']:.2f} times its seconds"
    )
    return seen


if __name__ == "__main__":
    main()
