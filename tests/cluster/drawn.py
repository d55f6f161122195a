"""Requests with drawn parameters: in range, at the edges, and beyond. A seed gives the same ones each time.

A body is text, because most of what lies at an edge of JSON has no number in Python: 1e400, half of a
surrogate pair.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_TOKENS = 30
"""Of the longest answers."""

BEYOND = 0.03
"""The share of values that lie beyond what is allowed."""

COMMON: dict[str, tuple[str, str]] = {
    "temperature": (
        "0 0.0 -0.0 5e-324 1e-320 1e-45 1e-38 1e-7 1e-3 0.5 1 1.5 2 null",
        '-1e-320 -1 2.0000001 1e308 1e400 true "1" [1] {} 99999999999999999999',
    ),
    "top_p": ("5e-324 1e-320 1e-45 1e-7 0.3 0.9 0.999999 0.99999999999 1 1.0 null", "0 -0.0 -1 1.000001"),
    "top_k": ("-1 0 1 2 20 199 49152 2147483647 null", "-2 2147483648 1.5 1e30 99999999999999999999"),
    "min_p": ("0 5e-324 1e-320 1e-45 1e-7 0.2 0.999999 1 null", "-1e-320 1.0000001 1e308"),
    "seed": ("0 -1 7 9223372036854775807 -9223372036854775808 null", "9223372036854775808 1.5 1e400"),
    "repetition_penalty": ("1e-6 0.00001 0.5 1 1.0 1.3 10 null", "0 -1 1e-7 1e-38 1e-300 1e-320 10.1 1e400"),
    "presence_penalty": ("-2 -1e-320 0 5e-324 1.5 2 null", "-2.1 2.0000001 1e308"),
    "frequency_penalty": ("-2 -1e-320 0 5e-324 1.5 2 null", "-2.1 2.0000001 1e308"),
    "n": ("1 2 2 5 null", "0 -1 17 99999999999999999999 2.5"),
    "min_tokens": ("0 1 2 null", "-1 31 1e30 99999999999999999999"),
    "ignore_eos": ("true false null", "1"),
    "stop": ('"a" "e" ["\\n","\\ufffd"] [] null', '"" ["x",""] 7 ["\\ud800"] [null]'),
    "cache_salt": ('"" "x" "\\u0000" "\\ud83e\\udd8a" null', '"\\udfff" 5'),
    "stream_options": ('{"include_usage":true} {} null', "[]"),
    "user": ('"x" null 5', ""),
    "suffix": ('"" null', '"x"'),
    "length_penalty": ("1 null", "2"),
}  # fmt: skip
"""Field -> (values in range, values beyond), in JSON, with blanks between them."""

CHAT: dict[str, tuple[str, str]] = {
    "logprobs": ("true false null", "5"),
    "top_logprobs": ("0 null", "1 21 -1"),
}
COMPLETION: dict[str, tuple[str, str]] = {
    "logprobs": ("0 1 5 20 null", "21 -1 true"),
    "echo": ("true false null", "1"),
}

LENGTHS = (1, 1, 2, 15, 16, 17, 40, 63, 64, 65, 128, 129, 200)
"""Of prompts, in tokens: pages have 16 and blocks 64."""

TEXTS = (
    "The harbour lay quiet while the ferry turned around the buoy.",
    "a",
    " ",
    "\n\n\t",
    "\u0000",
    "Grüße, 今天天气很好 🦊 \ufffd",
    "<|im_end|></s><s><unk><0x0A><|late|>",
    "def f(x):\n    return x\n" * 8,
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a generator knows of a model.

    ids      the tokenizer has all ids below this
    rows     of the embedding: at least as many
    poison   ids whose rows are no numbers
    lengths  of prompts of ids: those of a slow model are short
    """

    ids: int
    rows: int
    poison: tuple[int, ...] = ()
    lengths: tuple[int, ...] = LENGTHS


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request.

    lines   of a stream, after which the client leaves; of a whole answer it leaves soon; 0: it stays
    """

    path: str
    body: str
    stream: bool
    lines: int = 0

    @property
    def choices(self) -> int:
        """How many choices a whole answer has."""
        body = json.loads(self.body)
        prompt = body.get("prompt", "")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return (len(prompt) if several else 1) * (body.get("n") or 1)


def drawn(chosen: random.Random, vocabulary: Vocabulary) -> Iterator[Drawn]:
    """Draw requests without an end. Some of the prompts have a prefix in common."""
    texts = [_ids(chosen, vocabulary, max(vocabulary.lengths)) for _ in range(4)]
    while True:
        yield _draw(chosen, vocabulary, texts)


def _draw(chosen: random.Random, vocabulary: Vocabulary, texts: Sequence[list[int]]) -> Drawn:
    chat, stream = chosen.random() < 0.2, chosen.random() < 0.4
    fields = {"messages": _messages(chosen)} if chat else {"prompt": _prompt(chosen, vocabulary, texts)}
    fields["max_tokens"] = _one(chosen, f"0 1 1 2 5 5 {MAX_TOKENS}", '-1 1e3 99999 1e30 "5" [5]')
    if stream:
        fields["stream"] = "true"
    for name, (within, beyond) in (COMMON | (CHAT if chat else COMPLETION)).items():
        if chosen.random() < 0.3:
            fields[name] = _one(chosen, within, beyond)
    if chosen.random() < 0.3:
        fields["logit_bias"] = _biases(chosen, vocabulary)
    if chosen.random() < 0.3:
        fields["stop_token_ids"] = _stop_ids(chosen, vocabulary)
    if chat and fields.get("logprobs") == "true":
        fields["top_logprobs"] = chosen.choice(["0", "1", "20"])
    if chosen.random() < 0.05:
        fields |= _wish_for_end_tokens(chosen, vocabulary)
    if fields["max_tokens"] == "0":
        fields.pop("n", None)
        fields.pop("min_tokens", None)
    lines = chosen.choice([1, 1, 2, 3, 8]) if chosen.random() < 0.1 else 0
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    return Drawn(f"/v1/{'chat/' * chat}completions", body, stream, lines)


def _one(chosen: random.Random, within: str, beyond: str) -> str:
    return chosen.choice((beyond if beyond and chosen.random() < BEYOND else within).split())


def _prompt(chosen: random.Random, vocabulary: Vocabulary, texts: Sequence[list[int]]) -> str:
    """Draw a prompt in JSON: token ids, a text, several of either, or none at all."""

    def tokens() -> list[int]:
        length = chosen.choice(vocabulary.lengths)
        ids = chosen.choice(texts)[:length] if chosen.random() < 0.5 else _ids(chosen, vocabulary, length)
        if chosen.random() < 0.1:
            ids[chosen.randrange(length)] = _id_at_an_edge(chosen, vocabulary)
        return ids

    kind = chosen.random()
    if kind < BEYOND:
        return chosen.choice(['""', "[]", "[[]]", "null", "7", '[1,"a"]', "[[1],2]", '["a",""]', "[1.5]"])
    if kind < 0.6:
        return json.dumps(tokens())
    if kind < 0.75:
        return json.dumps([tokens() for _ in range(chosen.randint(1, 3))])
    if kind < 0.9:
        return json.dumps(chosen.choice(TEXTS))
    return json.dumps(chosen.sample(TEXTS, 2))


def _messages(chosen: random.Random) -> str:
    if chosen.random() < BEYOND:
        return chosen.choice(["[]", "null", '[{"role":"tool","content":"x"}]', '[{"role":"user"}]', '"hi"'])
    roles = ["system", "user", "assistant", "user"][chosen.randrange(4) :]
    return json.dumps([{"role": role, "content": chosen.choice(TEXTS)} for role in roles])


def _ids(chosen: random.Random, vocabulary: Vocabulary, count: int) -> list[int]:
    """Draw plain ids: neither special nor poisoned."""
    first, last = 3, vocabulary.ids
    ids = [chosen.randrange(first, last) for _ in range(count)]
    return [first if token in vocabulary.poison else token for token in ids]


def _id_at_an_edge(chosen: random.Random, vocabulary: Vocabulary) -> int:
    """Draw an id that is the first or the last of its kind, is beyond, or is poisoned."""
    ids, rows = vocabulary.ids, vocabulary.rows
    edges = (0, 1, 2, ids - 1, ids, rows - 1, rows, -1, 2**31, 2**64)
    return chosen.choice(vocabulary.poison if vocabulary.poison and chosen.random() < 0.3 else edges)


def _biases(chosen: random.Random, vocabulary: Vocabulary) -> str:
    """Draw a logit_bias in JSON: of a few tokens, of an id at an edge, or of as many as there may be."""
    kind = chosen.random()
    if kind < BEYOND:
        return chosen.choice(['{"x":1}', '{"-1":1}', '{"1.5":1}', '{"5":101}', '{"5":1e400}', "[]"])
    if kind < 0.2:
        return json.dumps({_id_at_an_edge(chosen, vocabulary): chosen.choice([-100, 5, 100])})
    few = kind < 0.7
    count = chosen.choice([0, 1, 5]) if few else min(vocabulary.ids, 1024)
    some = chosen.sample(range(vocabulary.ids), count)
    values = [-100, -100.0, -1e-300, 5e-324, 1e-300, 1e-45, 0, 3, 99.9999, 100]
    same = chosen.choice([-100, 1e-300, 100])
    return json.dumps({token: chosen.choice(values) if few else same for token in some})


def _wish_for_end_tokens(chosen: random.Random, vocabulary: Vocabulary) -> dict[str, str]:
    """Draw end tokens that are preferred to all others, and may not be chosen at first."""
    ends = chosen.sample(range(vocabulary.ids), 64)
    biases = json.dumps(dict.fromkeys(ends, 100))
    return {"stop_token_ids": json.dumps(ends), "logit_bias": biases, "min_tokens": "2", "max_tokens": "5"}


def _stop_ids(chosen: random.Random, vocabulary: Vocabulary) -> str:
    kind = chosen.random()
    if kind < BEYOND:
        return chosen.choice(["[-1]", "[1.5]", "5", json.dumps([5] * 65), "[99999999999999999999]"])
    if kind < 0.2:
        return json.dumps([_id_at_an_edge(chosen, vocabulary)])
    return json.dumps([chosen.randrange(vocabulary.ids) for _ in range(chosen.choice([0, 1, 64]))])
