"""Frequent slips of lab 9: the wrong numbers that they give, and what a student who makes one should look at.

Loaded by data.py. It belongs to no release. A slip is looked at after the right answer, so one that changes
little does no harm.
"""

from typing import Any

Slips = dict[str, list[tuple[float, str]]]

UNIT = "your unit: milli, kilo, giga or tera, 10^9 or 2^30, bits or bytes"
FACTORS, OF_MEMORY = (1e3, 1e6, 1e9, 1e12, 2**10, 2**20, 2**30, 8.0, 100.0), 2**30 / 1e9
"""What a wrong unit changes, and what it changes where gigabytes are counted: other slips can be as near."""


UPSIDE_DOWN = "FLOPs per byte: which of the two is divided by the other?"
ARITHMETIC = "this prompt is limited by arithmetic, not by memory"


def units(name: str, real: float) -> list[tuple[float, str]]:
    """Return what wrong units make of the answer to a question."""
    factors = (*FACTORS, OF_MEMORY) if name.endswith("_gb") or name == "memory_sequences" else FACTORS
    return [(real * by, UNIT) for one in factors for by in (one, 1 / one)]


def napkin_slips(one: Any, sizes: dict[str, int], right: dict[str, float]) -> Slips:
    """Return the slips of tasks 9a to 9c. one: a Napkin of data.py; right: the answers."""
    tokens, batch, context = sizes["prompt_tokens"], sizes["batch"], sizes["context"]
    group = one.heads / one.kv_heads
    flops, linear = one.prefill(tokens)[0], 2 * one.parameters * tokens
    attention, limit_s = flops - linear, sizes["tbt_limit"] / 1e3
    kv = [
        (0.5, "keys and values are both kept"),
        (1 / one.layers, "each layer keeps keys and values of its own"),
        (group, "with grouped queries, several query heads share one key and one value head"),
        (2.0, "the bytes of a number, and count keys and values once each"),
        (2 * group, "query heads share key and value heads; and the bytes of a number"),
        (1 / 128, "a head has many numbers"),
    ]

    def scaled(name: str, factors: list[tuple[float, str]]) -> list[tuple[float, str]]:
        return [(right[name] * by, why) for by, why in factors]

    weights_of_all = batch * one.weights + batch * context * one.kv
    alone = one.prefill(tokens - sizes["cached_tokens"])[0] / (one.compute * one.peak)
    step_flops = one.decode(batch, context)[0]
    return {
        "kv_token_bytes": scaled("kv_token_bytes", kv),
        "prompt_kv_gb": scaled("prompt_kv_gb", kv),
        "ridge": [(one.memory / one.peak, UPSIDE_DOWN)],
        "prefill_tflop": [
            (linear / 1e12, "attention: each token also meets the tokens before it, in each layer"),
            ((linear / 2 + attention) / 1e12, "a weight costs one multiplication and one addition"),
            (linear / 2e12, "a weight costs a multiplication and an addition; and attention"),
            ((linear + 2 * attention) / 1e12, "a token attends to those before it only: half of all pairs"),
            ((linear + attention / one.layers) / 1e12, "attention happens in each layer"),
            (flops / tokens / 1e12, "all tokens of the prompt, not one of them"),
        ],
        "prefill_intensity": [
            (flops / (tokens * one.weights), "a pass reads the weights once for all tokens of the prompt"),
            (flops / (one.weights / 2 + tokens * one.kv), "the bytes of a weight"),
            (flops / (one.weights * 2 + tokens * one.kv), "the bytes of a weight: 16 bits"),
            (flops / (tokens * one.kv), "the bytes of the weights, which are read too"),
            (one.prefill(tokens)[1] / flops, UPSIDE_DOWN),
        ],
        "step_intensity": [
            (step_flops / weights_of_all, "all sequences of a batch share one reading of the weights"),
            (step_flops / one.weights, "each sequence also reads the KV of its own context"),
            (step_flops / (one.weights + context * one.kv), "each sequence has a KV of its own to read"),
            (step_flops / (one.weights + batch * context * one.kv * group), "what grouped queries share"),
            (step_flops / batch / (one.weights + batch * context * one.kv), "the FLOPs of all sequences"),
            (1 / right["step_intensity"], UPSIDE_DOWN),
        ],
        "compute_s": [
            (right["compute_s"] * one.compute, "no program reaches the peak: use the share that is reached"),
            (right["compute_s"] * one.compute**2, "a lower share of the peak means a longer time"),
            (linear / (one.compute * one.peak), "attention is missing in your FLOPs"),
            (one.prefill(tokens)[1] / one.memory, ARITHMETIC),
            (one.prefill(tokens)[1] / (one.read * one.memory), ARITHMETIC),
        ],
        "load_s": [
            (right["load_s"] / 8, "a link is sold in bits per second, and KV is counted in bytes"),
            (tokens * one.kv / one.memory, "the KV comes over the link, which is slower than the memory"),
            (one.kv / one.link, "the KV of all tokens of the prompt"),
            *scaled("load_s", kv),
        ],
        "break_even_gbit": [
            (right["break_even_gbit"] / 8, "a link is sold in bits per second, and KV is counted in bytes"),
            (right["break_even_gbit"] / one.compute, "the real time of the prompt, not its time at the peak"),
            *scaled("break_even_gbit", kv),
        ],
        "rest_s": [
            (alone, "the new tokens also attend to the tokens that were loaded"),
            (one.prefill_s(sizes["cached_tokens"]), "which tokens are computed, and which are loaded?"),
            (right["compute_s"], "the loaded tokens are not computed again"),
            (right["rest_s"] * one.compute, "no program reaches the peak: use the share that is reached"),
        ],
        "base_ms": [
            (right["base_ms"] * one.read, "no program reaches the bandwidth: use the share that is reached"),
            (right["base_ms"] / 2, "the bytes of a weight"),
            (right["base_ms"] * 2, "the bytes of a weight: 16 bits"),
            (2e3 * one.parameters / (one.compute * one.peak), "an empty step waits for memory"),
        ],
        "sequence_ms": [
            (1e3 * context * one.key_s, "the linear layers: a sequence computes one token in each step"),
            (1e3 * one.sequence_s, "a sequence also reads the KV of its context"),
            (1e3 * (one.sequence_s + context * one.key_s * one.read), "the bandwidth that is reached"),
            (1e3 * (one.sequence_s + context * one.key_s * group), "query heads share key and value heads"),
            (right["sequence_ms"] + right["base_ms"], "the weights are read once for the whole batch"),
        ],
        "most_sequences": [
            (limit_s / one.each_s(context), "reading the weights takes a part of the limit already"),
            (limit_s / one.base_s, "what each sequence adds to a step"),
        ],
        "memory_sequences": [
            (one.memory_bytes / (context * one.kv), "the weights take a part of the memory"),
            ((one.memory_bytes - one.weights) / one.kv, "a sequence keeps the KV of its whole context"),
            ((one.memory_bytes - one.weights / 2) / (context * one.kv), "the bytes of a weight"),
            *[(right["memory_sequences"] / by, why) for by, why in kv],
        ],
        "requests_per_s": [
            (right["most_sequences"] / limit_s, "that is tokens per second; a request has many tokens"),
            (right["most_sequences"] / sizes["answer_tokens"], "how long does one step take?"),
            (1 / (sizes["answer_tokens"] * limit_s), "how many sequences are decoded at once?"),
        ],
    }  # fmt: skip


def load_slips(firm: Any, documents: int, right: dict[str, float]) -> Slips:
    """Return the slips of task 9d. firm: a Firm of data.py; right: the numbers by hand."""
    one, (prefill, decode) = firm.napkin, firm.given
    tokens = firm.document + firm.question
    reused, all_of_it = one.prefill_s(tokens, firm.document), one.prefill_s(tokens)
    load, base_ms = right["decode_load"], 1e3 * one.base_s
    last_s = firm.documents()[-1][0]
    return {
        "prefill_load": [
            (right["prefill_load"] * prefill, "all prefill nodes share the work"),
            (
                right["prefill_load"] * firm.requests / last_s / firm.rate,
                "the first request comes alone: count the seconds from the second one to the last",
            ),
            (firm.rate * all_of_it / prefill, "most prompts find their document in the pool"),
            (firm.rate * reused / prefill, "each document is new once, and then it is computed"),
            (right["prefill_load"] * one.compute, "the share of the peak that a prefill reaches"),
        ],
        "decode_load": [
            (load * decode, "all decode nodes share the sequences"),
            (load / firm.answer, "a request is decoded for many steps"),
            (load + firm.rate / decode * firm.answer * one.base_s, "a batch reads the weights once"),
            (load * one.read, "the share of the bandwidth that a step reaches"),
        ],
        "step_ms": [
            (base_ms, "the sequences, which take their share of each step"),
            (base_ms * (1 + load), "longer steps keep sequences longer, so that batches grow too"),
            (base_ms / max(0.01, 1 - load * decode), "all decode nodes share the sequences"),
        ],
        "pool_gb": [
            (firm.requests * tokens * one.kv / 1e9, "requests about one document share its blocks"),
            (documents * firm.document * one.kv / 1e9, "the full blocks of questions are stored too"),
            (documents * tokens * one.kv / 1e9, "each request has a question of its own"),
        ],
    }  # fmt: skip
