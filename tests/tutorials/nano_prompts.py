"""Prompts for nano_mooncake.py, and the greedy answers of the project's engine to them.

`python -m tests.tutorials.nano_prompts` writes nano_prompts.json. The engine and the NumPy model round
differently. Therefore a prompt is chosen only if its two best logits differ by MARGIN or more at each step of
the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.engine.runner import Runner
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from scheduler.instance import (
    DECODE,
    PREFILL,
    Arrived,
    Job,
    Limits,
    Pages,
    Staging,
    State,
    begin,
    next_step,
    on,
    pages_for,
)
from scheduler.instance.outcomes import Token

FILE = Path(__file__).with_name("nano_prompts.json")
MARGIN = 1e-3
ANSWER_TOKENS = 8
COUNT = 8
LONGEST = 512
"""Tokens of a prompt, the chat template included."""

MOONCAKES = """\
A mooncake is a round pastry that people in China eat at the mid-autumn festival. It is as wide as a hand
and as high as two fingers. A thin crust surrounds a thick filling of lotus seed paste or red bean paste. In
many of them lies the yolk of a salted duck egg, which stands for the full moon. On the crust a wooden mould
has pressed the name of the bakery, or a wish for a long life. Families cut a mooncake into small wedges and
drink tea with it. Friends give boxes of four mooncakes to each other. A story tells that rebels once hid
letters in mooncakes, because their rulers did not eat any. In the south the crust is soft and sweet, and in
the north it is made of many layers. Some bakers fill them with ham, some with ice cream, and some with nuts
of five kinds. A mooncake is heavy: one of them has as much energy as a whole dinner, so nobody eats it
alone. The festival falls on the fifteenth day of the eighth month of the lunar calendar, when the moon is
at its brightest. Children carry paper lanterns through the streets, and people look at the moon and think
of those who are far away."""
RIVERS = """\
A river begins at a spring, in a lake, or under a glacier. It takes the water of the rain that falls on its
basin, and carries it to the sea. Where the land is steep the water is fast, and cuts a valley in the shape
of a V. Where the land is flat the river is slow. It drops the sand that it has carried, and turns from side
to side in wide loops. Now and then a flood cuts through the neck of a loop, and leaves a lake in the shape
of an ox bow. At the mouth the river drops the rest of its load, and builds a delta."""

CANDIDATES = (
    "What is the capital of France?",
    "Write the numbers from one to ten as words.",
    MOONCAKES + "\n\nWhat is on the crust of a mooncake?",
    MOONCAKES + "\n\nWhen is the festival?",
    MOONCAKES + "\n\nWhat do families drink with a mooncake?",
    RIVERS + "\n\nWhere does a river begin?",
    MOONCAKES + "\n\n" + RIVERS + "\n\nWhat does a river drop at its mouth?",
    "Name three animals that live in the sea.",
    "Why is the sky blue? Answer in one sentence.",
    RIVERS + "\n\nHow does a lake in the shape of an ox bow come into being?",
    "Translate into French: Good morning, how are you today?",
    "Complete the sentence: The quick brown fox jumps over",
    "Write a Python function that returns the sum of two numbers.",
    RIVERS + "\n\nSummarise the text in one sentence.",
    "What do bees make?",
)


def engine_answers(folder: Path, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield {"text", "prompt_tokens", "answer", "margin"} of each text, computed by the engine.

    answer   token ids; an end token that the model chose is the last one
    margin   the least difference between the two best logits of a step
    """
    tokenizer = load_tokenizer(folder)
    engine = Engine(load_model(folder), pages_for(LONGEST + ANSWER_TOKENS, PAGE_TOKENS), BLOCK_TOKENS)
    for text in texts:
        prompt = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        tokens = list(_greedy(engine, prompt, frozenset(tokenizer.eos_ids)))
        margin = min(token.logprobs.best[0][1] - token.logprobs.best[1][1] for token in tokens)
        answer = [token.token for token in tokens]
        yield {"text": text, "prompt_tokens": len(prompt), "answer": answer, "margin": round(margin, 5)}


def _greedy(engine: Engine, prompt: list[int], stop_ids: frozenset[int]) -> Iterator[Token]:
    """Each token of the answer to one prompt, as an outcome with the logprobs of the two best."""
    duties, limits = frozenset({PREFILL, DECODE}), Limits(LONGEST)
    state = State(duties, Pages(engine.num_pages, PAGE_TOKENS), Staging(0, 0), BLOCK_TOKENS, limits)
    runner, sampling = Runner(engine), Sampling(0.0, logprobs=2)
    job = Job("one", 0, duties, prompt, 0, ANSWER_TOKENS, 8192, stop_ids, sampling)
    on(state, Arrived(job), time.monotonic())
    while state.busy:
        step = next_step(state, time.monotonic())
        begin(state, step)
        yield from (o for o in on(state, runner.run(step), time.monotonic()) if isinstance(o, Token))


def choose(folder: Path) -> dict[str, Any]:
    """Return the content of FILE: the first COUNT candidates whose length and margin allow it.

    Raises ValueError when there are fewer.
    """
    found = []
    for one in engine_answers(folder, CANDIDATES):
        if one["margin"] >= MARGIN and one["prompt_tokens"] <= LONGEST:
            found.append(one)
        if len(found) == COUNT:
            return {"answer_tokens": ANSWER_TOKENS, "least_margin": MARGIN, "prompts": found}
    raise ValueError(f"{len(found)} of {len(CANDIDATES)} candidates have a margin of {MARGIN}: add some")


if __name__ == "__main__":
    FILE.write_text(json.dumps(choose(resolve_model("default")), indent=1) + "\n")
