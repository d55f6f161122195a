"""Lab 6 at work: prompts on a live cluster, whose KV leaves by chunks and by layers, with a tree's functions.

Run by `mooncake-lite labs run 6`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON, and draws the last prompt as a timeline,
`run.yours.svg` or `run.reference.svg` beside this file. The ranks sleep for as long as the model would
compute, and invent its tokens. All layers of their KV are equal, so the texts say little: `labs check 6`
compares layers.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from mooncake_lite.model.config import load_config
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, model_folder, scaled_profile, started
from mooncake_lite.tools.client import TRACED, events

SIZES = ("--pool-bytes", "800MiB", "--max-model-len", "2176", "--kv-cache-bytes", "96MiB")
PROMPTS, DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 4, 1600, 512, 6
SPEEDUP = 4.0
"""The ranks emulate a machine that is so many times as fast as the measured one: stores matter more then."""

LANES = (
    ("1", "prefill: passes", ("prefill",)),
    ("1", "prefill: KV in", ("load KV",)),
    ("1", "prefill: KV out", ("store KV",)),
    ("2", "decode: KV in", ("load KV",)),
    ("2", "decode: steps", ("decode",)),
)
"""Lanes of the timeline: the rank, what it is called, and the events of the trace in it."""

WIDTH, LANE, LEFT = 900, 26, 120
COLOURS = ("#08519c", "#54278f", "#a63603", "#54278f", "#006d2c")


class Answer(NamedTuple):
    """One answer. times_s: of each token, from the request on; spans: as docs/reference/http.md has them."""

    text: str
    times_s: list[float]
    cached: int
    spans: list[dict[str, Any]]

    @property
    def gap_s(self) -> float:
        """From the first token to the second one."""
        return self.times_s[1] - self.times_s[0]

    @property
    def store_s(self) -> float:
        """From the first token until all KV of the prompt is in the pool."""
        return float(sum(span["seconds"] for span in self.spans if span["stage"] == "store"))


def ask(client: httpx.Client, prompt: list[int]) -> Answer:
    """Ask for one answer, as a stream."""
    how = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": NEW_TOKENS}
    text, times, last, began = "", list[float](), dict[str, Any](), time.monotonic()
    with client.stream("POST", "/v1/completions", json={"prompt": prompt, **how}, headers=TRACED) as response:
        for event in events(response.iter_lines()):
            last = event if "mooncake_lite" in event else last
            for choice in event.get("choices", ()):
                if choice["text"] or not choice.get("finish_reason"):
                    times.append(time.monotonic() - began)
                text += choice["text"]
    trace = last["mooncake_lite"]
    return Answer(text, times, sum(trace["cached_tokens"].values()), trace["spans"])


def rows_of(what: str, answers: list[Answer]) -> list[dict[str, Any]]:
    """Lines of the table: medians over some answers, whose texts must be equal on both sides."""
    text = "\n".join(answer.text for answer in answers)
    seconds = {
        "first token": [answer.times_s[0] for answer in answers],
        "from the first token until all is stored": [answer.store_s for answer in answers],
        "from the first token until the second one": [answer.gap_s for answer in answers],
    }
    return [
        {
            "what": f"{what}: {name}", "tokens": [*text.encode()], "seconds": statistics.median(found),
            "reused": sum(answer.cached for answer in answers), "said": "", "kind": "texts",
        }
        for name, found in seconds.items()
    ]  # fmt: skip


def spans_of(path: Path, first_us: float) -> list[tuple[int, float, float, str]]:
    """Read a trace. Returns (lane, begin, end, what) of the events from a moment on, in microseconds."""
    text = json.loads(path.read_text(encoding="utf-8"))
    found: list[tuple[int, float, float, str]] = []
    open_at: dict[tuple[int, int], list[tuple[float, str]]] = {}  # (process, lane) -> begins without an end
    for event in text["traceEvents"] if isinstance(text, dict) else text:
        if event["ph"] == "X":  # a step
            found.append((event["pid"], event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "B":
            open_at.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["name"]))
        elif event["ph"] == "E":
            begin, name = open_at[event["pid"], event["tid"]].pop()
            if name.endswith("KV"):  # a transfer
                found.append((event["pid"], begin, event["ts"], name))
    return [
        (lane, begin, end, name)
        for process, begin, end, name in found
        if begin >= first_us
        for lane, (rank, _, names) in enumerate(LANES)
        if f"{process}" == rank and name in names
    ]


def timeline(spans: list[tuple[int, float, float, str]], title: str) -> str:
    """Return the timeline as SVG: a lane for each thing that a rank does, time to the right.

    Transfers that overlap stand in two rows of their lane, so that a long one hides no short one.
    """
    begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
    ends: dict[tuple[int, int], float] = {}  # (lane, row) -> until when it is in use
    scale = (WIDTH - LEFT - 20) / (end - begin)
    height = 60 + LANE * len(LANES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-size="11" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="6" y="14">{escape(title)}</text>'
    ]
    for lane, (_, name, _) in enumerate(LANES):
        parts.append(f'<text x="6" y="{41 + LANE * lane}">{escape(name)}</text>')
    for lane, first, last, name in sorted(spans, key=lambda span: span[1]):
        x, wide = LEFT + scale * (first - begin), max(1.0, scale * (last - first))
        row = int(ends.get((lane, 0), 0.0) > first)
        ends[lane, row] = last
        height, y = (LANE - 8) // 2 if name.endswith("KV") else LANE - 8, 28 + LANE * lane + row * LANE // 3
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" '
            f'fill="{COLOURS[lane]}" fill-opacity="0.7"><title>{escape(name)}: '
            f"{(first - begin) / 1e3:.1f} to {(last - begin) / 1e3:.1f} ms</title></rect>"
        )
    y = 44 + LANE * len(LANES)
    for part in range(6):
        ms = (end - begin) / 5e3 * part
        x = LEFT + (WIDTH - LEFT - 20) * part / 5
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{ms:.0f} ms</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Play everything, and draw the last prompt."""
    folder = model_folder(Path(sys.argv[1]) if sys.argv[1] not in ("", "-") else None)
    draw, ids = random.Random("lab 6"), range(1000, load_config(folder).vocab_size)
    documents = [draw.choices(ids, k=DOCUMENT_TOKENS) for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        flags = [str(folder), "--engine", "emulated", *FOUR_RANKS, *SIZES, "--trace", str(trace)]
        with (
            started(flags, scaled_profile(folder, 1 / SPEEDUP)) as cluster,
            httpx.Client(base_url=cluster.base_url, timeout=120, trust_env=False) as client,
        ):
            first = [ask(client, document) for document in documents]
            later = []
            for document in documents:
                began = time.monotonic()
                later.append(ask(client, document + draw.choices(ids, k=QUESTION_TOKENS)))
        picture = Path(__file__).parent / f"run.{'yours' if Path.cwd().name == 'yours' else 'reference'}.svg"
        spans = spans_of(trace, 1e6 * began)
        picture.write_text(
            timeline(spans, "the last prompt: its beginning comes from the pool"), encoding="utf-8"
        )
    rows = [*rows_of("new prompt", first), *rows_of("prompt with a known beginning", later)]
    stored_s, gap_s = (row["seconds"] for row in rows[1:3])
    rows[-1]["gain"] = (
        f"new prompts: all KV is stored {1e3 * stored_s:.1f} ms after the first token, and the second token "
        f"comes {1e3 * gap_s:.0f} ms after it. A timeline of the last prompt is in {picture}"
    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
