"""The next token of each row of logits.

Called by `engine.Engine`, on the rank that holds the request. A token is a function of the logits, the
sampling parameters, and the sequence's tokens alone. So a request that moves to another rank continues with
the same tokens, and no row depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.logprobs import logprobs_of
from mooncake_lite.engine.nucleus import kept
from mooncake_lite.engine.penalties import adjust, changes_logits
from mooncake_lite.messages import Sampling
from scheduler.instance.step import NO_TOKEN, Draw


@np.errstate(over="ignore", invalid="ignore")
def sample(logits: np.ndarray, draws: Seq[Draw]) -> list[Drawn]:
    """Choose a token for each row of `logits` (rows, vocab), float32.

    A row whose best logit is not finite, as it is or once changed, gives NO_TOKEN. A NaN counts as the best.

    In this order: logprobs are taken from the logits as they are; bias, min_tokens and penalties change the
    logits (penalties.py); at temperature 0 the best token is taken, the lowest id among equals; otherwise
    softmax(logits / temperature), cut to min_p, top_k and top_p (nucleus.py), and one number drawn.
    """
    samplings: list[Sampling] = [draw.sampling for draw in draws]
    logprobs = [row for row, how in enumerate(samplings) if how.logprobs >= 0]
    raw = dict(zip(logprobs, torch.from_numpy(logits[logprobs]).log_softmax(dim=1).numpy()))
    tokens, finite = _best(logits)
    changed = [row for row, draw in enumerate(draws) if finite[row] and changes_logits(draw)]
    if changed:
        logits = logits.copy()
        for row in changed:
            adjust(logits[row], draws[row])
        tokens[changed], finite[changed] = _best(logits[changed])
    drawn = [row for row, how in enumerate(samplings) if finite[row] and how.temperature > 0]
    for row, probabilities in zip(drawn, _softmax(logits, drawn, samplings)):
        tokens[row] = _draw(probabilities, draws[row])
    return [
        Drawn(int(token), logprobs_of(raw[row], int(token), how.logprobs) if row in raw else None)
        if finite[row]
        else Drawn(NO_TOKEN)
        for row, (token, how) in enumerate(zip(tokens, samplings))
    ]


def _best(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best token of each row, the lowest id among equals, and whether its logit is finite."""
    tokens = logits.argmax(axis=1)
    return tokens, np.isfinite(logits[np.arange(len(logits)), tokens])


def _softmax(logits: np.ndarray, rows: list[int], samplings: list[Sampling]) -> np.ndarray:
    """Probabilities (len(rows), vocab) float32 of logits / temperature, whatever the temperature."""
    if not rows:
        return np.empty((0, logits.shape[1]), dtype=np.float32)
    behind = logits[rows] - logits[rows].max(axis=1, keepdims=True)
    temperatures = np.array([samplings[row].temperature for row in rows], dtype=np.float64)
    # Below this temperature all but the best tokens have no weight; a smaller one would divide 0 by 0.
    behind /= np.maximum(temperatures, 1e-30).astype(np.float32)[:, None]
    return torch.from_numpy(behind).softmax(dim=1).numpy()


def _draw(probabilities: np.ndarray, draw: Draw) -> int:
    """Token id drawn from `probabilities` (vocab,) by inversion.

    A function of the seed, the branch and the position in the sequence: the branches of a prompt are those of
    consecutive seeds.
    """
    uniform = _uniform(draw.sampling.seed + draw.branch, draw.position)
    ids = kept(probabilities, draw.sampling)
    reached = np.cumsum(probabilities if ids is None else probabilities[ids], dtype=np.float64)
    index = min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), len(reached) - 1)
    return index if ids is None else int(ids[index])


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    generator = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(generator).random())
