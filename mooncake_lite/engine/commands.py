"""`mooncake-lite generate`: one prompt, one process, no MPI."""

from __future__ import annotations

import secrets
import time
from typing import Literal

import click

from mooncake_lite.config.options import NumberRange
from mooncake_lite.config.serve import (
    DEFAULT_MODEL,
    check_batch_invariant,
    check_device_name,
    check_speculate,
    check_weight_choice,
)
from mooncake_lite.errors import ConfigError


@click.command()
@click.argument("prompt")
@click.option("--model", "name", default=DEFAULT_MODEL, show_default=True, help="Name or model folder.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, type=NumberRange(0.0, 2.0))
@click.option("--top-p", default=1.0, show_default=True, type=NumberRange(0.0, 1.0, min_open=True))
@click.option(
    "--top-k", default=0, show_default=True, type=click.IntRange(-1, 2**31 - 1), help="0 keeps all."
)
@click.option("--seed", default=None, type=int, help="The same seed gives the same answer.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "published", "float32"]),
    help="published: as they lie in the model's GGUF file; auto: those for a few tokens, float32 for many.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--batch-invariant", is_flag=True, help="Use the kernels of `serve --batch-invariant`. Slower.")
@click.option(
    "--speculate", default="off", show_default=True, help="Drafts: off or prompt-lookup. Same answers."
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
def generate(
    prompt: str,
    name: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    dtype: Literal["float32", "bfloat16"],
    weights: Literal["auto", "published", "float32"],
    device: str,
    batch_invariant: bool,
    speculate: str,
    raw: bool,
) -> None:
    """Answer PROMPT in this process and print the answer as it comes.

    The first call with a kind of model compiles its kernels, which takes about half a minute on two cores,
    and shows how far it is. Later calls load the compiled kernels from the cache folder. The progress and the
    figures go to stderr, the answer alone to stdout; compiling is no part of tokens/s.
    """
    check_device_name(device)
    check_weight_choice(weights, dtype, device)
    check_batch_invariant(batch_invariant, dtype, device)
    check_speculate(speculate)

    from mooncake_lite.config.machine import usable_cores
    from mooncake_lite.engine.local import generate_all, load_visibly
    from mooncake_lite.messages import Sampling
    from mooncake_lite.model.progress import resolve_visibly
    from mooncake_lite.model.tokenizer import load_tokenizer

    folder = resolve_visibly(name)
    tokenizer = load_tokenizer(folder)
    text = prompt if raw else tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    prompt_ids = tokenizer.encode(text, add_special_tokens=raw)
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give at least one token")
    cores = usable_cores()
    model = load_visibly(folder, dtype, device, weights, cores, batch_invariant=batch_invariant)
    seed = secrets.randbits(63) if seed is None else seed
    sampling = Sampling(temperature, top_p, top_k, seed)

    detokenizer = tokenizer.detokenizer()
    times = []
    stop_ids = frozenset(tokenizer.eos_ids)
    drafts = speculate != "off"
    for _, token in generate_all(model, [prompt_ids], sampling, max_tokens, stop_ids, speculates=drafts):
        times.append(time.perf_counter())
        click.echo(detokenizer.push([token]), nl=False)
    click.echo(detokenizer.flush())
    if len(times) > 1:
        rate = (len(times) - 1) / (times[-1] - times[0])
        click.echo(f"[{len(prompt_ids)} prompt tokens, {len(times)} answered, {rate:.1f} tokens/s]", err=True)
