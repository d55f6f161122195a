"""Tokens per second with drafts from the text itself, beside the same answers without.

Run by `ideas`. Greedy answers of the default model to chats, in this process: lists, texts and JSON to copy,
and essays, which repeat nothing. Explained in docs/explain/speculation.md.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from mooncake_lite.engine.local import generate_all, use_threads
from mooncake_lite.messages import Sampling
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from mooncake_lite.tools.bench.engine_sides import PASS, THREADS, Ours, Prompts
from mooncake_lite.tools.bench.result import Other, Row, medians

PEOPLE = (
    "Anna Berg, 31, Paris", "Ben Cole, 25, Rome", "Cleo Dahl, 47, Oslo", "Dan Ek, 38, Bern",
    "Eve Frey, 29, Wien", "Finn Gray, 52, Cork", "Gil Hart, 33, Nice", "Hana Ito, 41, Kobe",
)  # fmt: skip
ROWS = ",\n".join(
    '  {{"name": "{}", "age": {}, "city": "{}"}}'.format(*person.split(", ")) for person in PEOPLE
)
TEXT = (
    "The harbour of the old town lies below a hill. In the morning the fishing boats come back with herring "
    "and cod, and the auction begins before seven. Tourists watch it from the quay, where three cafes sell "
    "coffee and rolls. In the afternoon the ferry to the islands leaves, and by evening the quay is empty."
)
CHATS = {
    "a list is copied": "Repeat this list:\n" + "\n".join(PEOPLE),
    "a text is copied": "Copy this text word by word:\n" + TEXT,
    "JSON rows are copied": f"Repeat this JSON:\n[\n{ROWS}\n]",
    "JSON rows are mixed up": f"Copy this JSON word by word:\n[\n{ROWS}\n]",  # by this small model
    "an essay": "Explain how a steam engine works, in your own words.",
}
ESSAYS = (
    "How is bread baked?", "Write an essay about why Rome fell.", "Write an essay about the sea.",
    "Explain what a rainbow is.",
)  # fmt: skip


def drafts(ours: Ours, folder: Path, new: int, runs: int) -> list[Row]:
    """Measure each kind of answer of up to `new` tokens alone, then all together, then on one thread."""
    tokenizer = load_tokenizer(folder)
    chats = {name: _chat(tokenizer, text) for name, text in CHATS.items()}
    rows = [_row(ours, tokenizer, name, [chat], new, runs) for name, chat in chats.items()]
    essays = [_chat(tokenizer, text) for text in ESSAYS]
    mixed = [*chats.values(), *essays[:3]] * 2
    rows.append(_row(ours, tokenizer, f"{len(mixed)} at once, mixed", mixed, new, runs))
    before = _chat(tokenizer, "Remember this:\n" + TEXT * 27)[:1900]
    long = [*before, *chats["a text is copied"]]
    rows.append(_row(ours, tokenizer, f"a text is copied after {len(before):,} tokens", [long], new, runs))
    use_threads(1)
    try:
        rows.append(
            _row(ours, tokenizer, "a text is copied", [chats["a text is copied"]], new, runs, threads=1)
        )
    finally:
        use_threads(THREADS)
    return rows


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the prompt of a chat of one message."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(prompt, add_special_tokens=False)


def _row(
    ours: Ours, tokenizer: Tokenizer, name: str, prompts: Prompts, new: int, runs: int, threads: int = THREADS
) -> Row:
    stop_ids = frozenset(tokenizer.eos_ids)

    def rate(speculates: bool) -> float:
        """Return the tokens per second of decoding: all but the first ones."""
        times = []
        for _ in generate_all(ours.model, prompts, Sampling(0.0), new, stop_ids, PASS, speculates):
            times.append(time.perf_counter())
        first = len(prompts)
        return (len(times) - first) / max(1e-9, times[-1] - times[first - 1])

    on, off = medians(runs, partial(rate, True), partial(rate, False))
    where = f"drafts by prompt lookup, {threads} thread{'s' * (threads > 1)}: {name}"
    return Row(where, "tokens/s", on, Other("without drafts", off), None, runs)
