"""Several ranks as one instance: what tensor parallel members gain, and a context that lies on several.

Run by `ideas`, on clusters of real engines. Explained in docs/explain/several-ranks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.sizes import page_nbytes
from mooncake_lite.tools.bench.cluster import started, stream_times, tpot_s
from mooncake_lite.tools.bench.engine_sides import random_prompts
from mooncake_lite.tools.bench.result import Other, Row, medians
from mooncake_lite.tools.streams import Prompt, play


def tensor(folder: Path, vocab: int, contexts: Sequence[int], new: int, runs: int) -> list[Row]:
    """Tokens per second of one stream, on two members of one thread each and on one such rank.

    contexts   tokens of each prompt; new: of each answer

    Raises ClusterError.
    """
    common = [str(folder), "--threads", "1", "--max-model-len", str(max(contexts) + new)]
    two = ["--decode", "2", "--decode-tensor-parallel-size", "2"]
    rows = []

    def rate(port: int, prompt: list[int]) -> float:
        return 1 / tpot_s(stream_times(port, [prompt], new), new)

    with started(common) as alone, started([*common, *two]) as members:
        for tokens in contexts:
            (prompt,) = random_prompts(1, tokens, vocab)
            sides = [partial(rate, cluster.port, prompt) for cluster in (alone, members)]
            medians(1, *sides)  # from now on the pool has the prompt
            one, both = medians(runs, *sides)
            name = f"decode on two tensor parallel members of one thread: {tokens:,} + {new} tokens"
            peer, limit = Other("one rank of one thread", one), Other("twice as much", 2 * one)
            rows.append(Row(name, "tokens/s", both, peer, limit, runs))
    return rows


def context(folder: Path, vocab: int, turns: int, tokens: int, new: int, runs: int) -> Row:
    """Tokens per second of one stream whose context fills the pages of `turns` members, and of one rank.

    tokens   of prompt and answer together; new: of the answer

    Prompts are computed by a pipeline, whose ranks have no more memory for pages than a member. Raises
    ClusterError, also when an answer differs from that of one rank that has pages for all.
    """
    model = load_config(folder)
    stages = next(n for n in range(turns, model.layers + 1) if -(-model.layers // n) * turns <= model.layers)
    nbytes = page_nbytes(ServeConfig(), model) * (tokens // PAGE_TOKENS)
    common = [str(folder), "--threads", "1", "--batch-invariant", "--max-model-len", str(tokens)]
    several = ["--decode", str(turns), "--decode-context-parallel-size", str(turns)]
    several += ["--prefill", str(stages), "--pipeline-parallel-size", str(stages)]
    several += ["--kv-cache-bytes", str(nbytes // turns)]
    (prompt,) = random_prompts(1, tokens - new, vocab)
    texts = set()

    def rate(port: int) -> float:
        ((stream,), _) = play(f"http://127.0.0.1:{port}", [Prompt(prompt, new)])
        texts.add(stream.text)
        if stream.error or len(texts) > 1:
            why = stream.error or "answers differ"
            raise ClusterError(f"a context of {tokens} tokens on one rank and on {turns} members: {why}")
        return 1 / tpot_s([stream.times[1:]], new)

    with started([*common, "--kv-cache-bytes", str(nbytes)]) as one, started([*common, *several]) as members:
        alone, together = medians(runs, partial(rate, one.port), partial(rate, members.port))
    name = (
        f"decode on {turns} members with pages for {tokens // turns:,} tokens each: a context of {tokens:,}"
    )
    return Row(name, "tokens/s", together, Other("one rank with pages for all", alone), None, runs)
