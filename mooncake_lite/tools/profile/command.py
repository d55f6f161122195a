"""`mooncake-lite profile`: measures the real engine, fits its cost, and writes a profile file.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/run-many-ranks.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec
from rich.table import Table

from mooncake_lite.config.options import OUT_FILE, write_out
from mooncake_lite.config.progress import bar, wide_console
from mooncake_lite.config.serve import DEFAULT_MODEL, check_device_name, check_weight_choice
from mooncake_lite.errors import ConfigError
from mooncake_lite.simulator.figure import check_plot

if TYPE_CHECKING:
    from mooncake_lite.engine.engine import Engine
    from mooncake_lite.model.config import ModelConfig
    from mooncake_lite.profiles.file import EngineUsed, Profile


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--out", type=OUT_FILE, required=True, help="File to write.")
@click.option("--quick", is_flag=True, help="Measure fewer passes, within a minute.")
@click.option("--plot", type=OUT_FILE, help="Draw fit and measurement into this .svg or .png file.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "published", "float32"]),
    help="As for serve.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", default=0, type=click.IntRange(0), help="0 takes every core.")
@click.option("--time-scale", default=1.0, show_default=True, help="Factor on all times; 0.5: twice as fast.")
def profile(
    model: str,
    out: Path,
    quick: bool,
    plot: Path | None,
    dtype: Literal["float32", "bfloat16"],
    weights: Literal["auto", "published", "float32"],
    device: str,
    threads: int,
    time_scale: float,
) -> None:
    """Measure how long the real engine takes with MODEL, and how fast KV moves; write a profile file.

    The conductor of `mooncake-lite serve --profile FILE` predicts waits by these times. With `--engine
    emulated` a rank sleeps for them. If FILE exists and is of the same model, its other sections stay.
    """
    check_device_name(device)
    check_weight_choice(weights, dtype, device)
    if not time_scale > 0:
        raise ConfigError(f"time_scale={time_scale:g}: give a factor above 0")
    check_plot(plot)

    from mooncake_lite.config.machine import usable_cores
    from mooncake_lite.model.config import load_config
    from mooncake_lite.model.progress import resolve_visibly
    from mooncake_lite.profiles.file import EngineUsed, new_profile, write_profile

    folder = resolve_visibly(model)
    sizes = load_config(folder)
    before = _existing(out, sizes, folder.name)
    used = EngineUsed(dtype, device, weights, threads or usable_cores())
    sections = _measured(folder, sizes, used, quick, time_scale, out.absolute().parent)
    made = new_profile(folder.name, sizes, dtype, before.sections if before else {})
    for section, content in sections.items():
        made = made.with_section(section, content)
    write_profile(out, made)
    _show(made)
    if plot is not None:
        from mooncake_lite.tools.profile.plot import draw

        write_out("--plot", plot, draw(made, plot.suffix))
    click.echo(f"wrote {out}; use it with: mooncake-lite serve {model} --engine emulated --profile {out}")


def _existing(out: Path, sizes: ModelConfig, name: str) -> Profile | None:
    """Return the profile that is to be updated. Raises ConfigError when it is another model's."""
    from mooncake_lite.profiles.file import model_fingerprint, read_profile

    if not out.exists():
        return None
    before = read_profile(out)
    if before.model.fingerprint != model_fingerprint(sizes):
        raise ConfigError(
            f"out={str(out)!r} is a profile of {before.model.name}, not of {name}; choose another file"
        )
    return before


def _measured(
    folder: Path, sizes: ModelConfig, used: EngineUsed, quick: bool, time_scale: float, tier_folder: Path
) -> dict[str, msgspec.Struct]:
    """Load the model, time passes, prompts and moves, and fit their costs. Returns sections by name."""
    from mooncake_lite.launch.threads import set_thread_environment

    set_thread_environment(used.threads)  # torch reads it when it is imported, by `measure`
    from mooncake_lite.profiles.compute import CHUNK_TOKENS
    from mooncake_lite.profiles.file import ComputeSection, PrefillSection
    from mooncake_lite.profiles.fit import error_of, errors, fit, fit_prompts
    from mooncake_lite.tools.profile import measure
    from mooncake_lite.tools.profile.exchanges import measure_exchange
    from mooncake_lite.tools.profile.moves import measure_moves
    from mooncake_lite.tools.profile.overheads import measure_overheads

    todo = measure.plan(sizes.max_position, quick)
    engine = _engine(folder, used, measure.pages_needed(todo.shapes))
    with bar("measuring forward passes", todo.num_passes) as update:
        passes = measure.measure(engine, todo, lambda count: update(completed=count))
        before = (todo.runs + 1) * len(todo.shapes)
        prompts = measure.measure_prompts(engine, todo, lambda count: update(completed=before + count))
    moves = measure_moves(engine, tier_folder, lambda text: click.echo(text, err=True))
    besides = measure_overheads(folder, lambda text: click.echo(text, err=True))
    cost, whole = fit(passes), fit_prompts(prompts)
    return {
        **({} if besides is None else {"overheads": besides}),
        "compute": ComputeSection(used, cost, errors(cost, passes), passes, time_scale),
        "prefill": PrefillSection(CHUNK_TOKENS, whole, error_of(whole, prompts), prompts),
        "moves": moves,
        "exchange": measure_exchange(sizes),
    }


def _engine(folder: Path, used: EngineUsed, pages: int) -> Engine:
    """Load the model as `generate` does, with its kernels compiled."""
    from mooncake_lite.engine.engine import Engine
    from mooncake_lite.engine.local import BLOCK_TOKENS, load_visibly
    from mooncake_lite.engine.warm import warm_up

    dtype: Any = used.dtype
    model = load_visibly(folder, dtype, used.device, used.weights, used.threads, "none")
    engine = Engine(model, pages, BLOCK_TOKENS)
    warm_up(engine)
    return engine


def _show(made: Profile) -> None:
    """Print fit beside measurement, the errors of the fits, and the rates of moves."""
    section, prefill, moves = made.compute, made.prefill, made.moves
    assert prefill is not None
    assert moves is not None
    table = Table("pass", "tokens", "attended keys", "measured ms", "fit ms", "error %")
    for column in table.columns[1:]:
        column.justify = "right"

    def add(kind: str, tokens: str, keys: str, seconds: float, fitted: float) -> None:
        off = f"{100 * (fitted / seconds - 1):+.0f}"
        table.add_row(kind, tokens, keys, f"{1e3 * seconds:.1f}", f"{1e3 * fitted:.1f}", off)

    for one in section.passes:
        load = one.load
        tokens = [f"{count:,}" for count in (load.new_tokens, load.sequences) if count]
        keys = [f"{count:,}" for count in (load.pairs, load.context) if count]
        add(one.kind, " + ".join(tokens), " + ".join(keys), one.seconds, section.fit.seconds(load))
    for prompt in prefill.prompts:
        fitted = prefill.fit.seconds(prompt.num_tokens, prompt.cached)
        add("prompt", f"{prompt.num_tokens:,}", f"{prompt.cached:,} cached", prompt.seconds, fitted)
    wide_console().print(table)
    for kind, error in [*section.error.items(), ("prompt", prefill.error)]:
        click.echo(f"{kind}: the fit is off by {error.mean:.0%} on average, {error.largest:.0%} at most")
    for name, rate in (
        ("between ranks of one node", moves.near_bytes_per_s),
        ("from DRAM into pages", moves.dram_bytes_per_s),
        ("from SSD", moves.ssd_bytes_per_s),
    ):
        click.echo(f"KV {name}: {f'{rate / 1e9:.2f} GB/s' if rate else 'not measured'}")
    latency_us, gb_per_s = 1e6 * made.exchange.latency_s, made.exchange.bytes_per_s / 1e9
    click.echo(f"exchange of two ranks of one node: {latency_us:.0f} us and {gb_per_s:.2f} GB/s")
    if (besides := made.overheads) is not None:
        step_ms, message_ms, request_ms = (1e3 * seconds for seconds in msgspec.structs.astuple(besides))
        click.echo(
            f"besides: {step_ms:.2f} ms between passes, {message_ms:.2f} ms for a message, "
            f"{request_ms:.2f} ms for a request in the gateway"
        )
