"""`mooncake-lite serve`: reads flags and a TOML file into a ServeConfig, then starts a launcher or a rank.

Mounted by `mooncake_lite.cli`. Every field of ServeConfig is a flag. Flags take precedence over the
environment, the environment over the file, and the file over defaults. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config import ServeConfig, config_from, read_toml
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import SECRET, SECRETS, TENANTS
from mooncake_lite.launch.place import world_from_environment
from mooncake_lite.modes import BY_MODE
from mooncake_lite.service_classes import TABLES

HELP: dict[str, str] = {
    "served_model_name": "Id of the model in the API. By default the name of its folder.",
    "dtype": "Data type of weights and KV cache. On CPUs bfloat16 is correct but not faster.",
    "device": "Device of the ranks that compute: cpu or cuda.",
    "engine": "real: computes. emulated: sleeps for as long as the profile says and invents tokens, so that "
    "many ranks run on one machine.",
    "profile": "File with measured times, written by `mooncake-lite profile`, or the name of a profile that "
    "comes with the package. The conductor predicts by it; the emulated engine sleeps by it. By default the "
    "package's profile of this model; with a real engine, only on the CPU that it was measured on.",
    "weights": "Form in which weights are read. published: the default model's 4- and 8-bit GGUF blocks; "
    "float32: the tensors made of them; auto: blocks in decode and float32 in prefill, each where it is "
    "faster.",
    "host": "Address of the HTTP server.",
    "port": "Port of the HTTP server.",
    "api_key": f"Key that clients must send. Prefer the variable {SECRET}: other users can read flags.",
    "allowed_origins": "Origins of web pages that may call the server, separated by commas, as "
    "https://app.example:8443. loopback: pages that this machine serves, at any port; *: all pages.",
    "allowed_hosts": "Host names by which clients may call the server, separated by commas, as llm.example. "
    "IP addresses, localhost and the machine's own name are always allowed. By default a server on loopback "
    "refuses other names, and any other server takes all names.",
    "mode": "How ranks share the work. pooled: KV goes from prefill to decode ranks through a pool of store "
    "ranks. split: it goes straight to the decode rank, without a pool. colocated: each compute rank "
    "does both.",
    "prefill": "Number of ranks that compute prompts, 1 by default. None in mode colocated.",
    "decode": "Number of ranks that generate answers, 1 by default. None in mode colocated.",
    "compute": "Number of ranks that do both, 2 by default. In mode colocated only.",
    "store": "Number of ranks that lend DRAM to the KVCache pool and keep the HDF5 tier. By default 1 in "
    "mode pooled and 0 in mode colocated. None in mode split.",
    "mpi_profile": "How ranks exchange bytes. ft: Open MPI's own layer; when a rank dies, the others seal "
    "their files and end with a message. fast: UCX, for RDMA fabrics; when a rank dies, MPI ends the job "
    "at once.",
    "hosts": "Hosts and their slots for mpirun, as a:2,b:2.",
    "control_host": "Address at which other hosts reach the conductor.",
    "mpi_arg": "Additional arguments for mpirun, as '--mca NAME VALUE'. May be repeated.",
    "pool_bytes": "DRAM that each store rank lends to the pool, in /dev/shm, as 512MiB.",
    "lend_bytes": "DRAM that each rank that computes lends to the pool, by default none. In mode split: DRAM "
    "of each decode rank for KV on its way to it, by default 512MiB.",
    "ssd_dir": "Folder of the HDF5 tier. A later start with the same folder reuses its blocks. By default "
    "there is no tier.",
    "ssd_bytes": "Capacity of the tier of each store rank.",
    "block_size": "Tokens per block of the pool; must divide 512.",
    "kv_codec": "Encoding of blocks in the pool and on SSD. int8 takes a quarter of the space of float32.",
    "eviction": "Policy that evicts blocks from the pool's DRAM: lru, lfu, arc, s3fifo, ... [+second-hit].",
    "copy_cold_s": "Seconds without a read after which the copy of a hot block is evicted first.",
    "kv_cache_bytes": "Memory for the KV pages of each rank that computes.",
    "staging_bytes": "Shared memory through which each rank that computes moves KV.",
    "max_model_len": "Longest prompt and answer together, in tokens. 0 takes the model's own limit.",
    "max_num_seqs": "Sequences that one rank decodes at once.",
    "max_num_batched_tokens": "Tokens that a rank computes in one forward pass. Prompts get what the running "
    "sequences leave.",
    "max_num_partial_prefills": "Prompts that one rank computes at once. They share each forward pass.",
    "enable_chunked_prefill": "Cut long prompts into chunks. Without, each is computed in one pass, and "
    "decoding waits for it.",
    "policy": "Where a request is prefilled and decoded: kvcache-centric (the paper's Algorithm 1), "
    "global-cache, topology, local-cache, least-loaded, two-choices, round-robin, random or dynamo.",
    "balancing_threshold": "A rank fetches a prefix that is more than this many times longer than the one "
    "near it, and hot blocks are copied likewise: the paper's kvcache_balancing_threshold, at least 1, for "
    "--policy kvcache-centric.",
    "admission": "Which requests are refused: none, bounded-queue, after-prefill, early-rejection, "
    "predictive or shed. The last four go by limits on latency; after-prefill needs prefill ranks.",
    "racks": "Rack of each node as numbers, as 0,0,1,1, for --policy topology. Nodes are in the order of "
    "their first ranks. By default every node is a rack of its own.",
    "queue": "Which waiting request begins first: fcfs, srpt, aged-srpt, deadline, fair or predicted.",
    "queue_ageing": "Seconds of prefill that a second of waiting is worth, for --queue aged-srpt.",
    "trust": "Part of the decode slots that go to the shortest predicted answer, 0 to 1, for --queue "
    "predicted. The others go first come, first served.",
    "slo_ttft_ms": "Limit on the time to first token in milliseconds, for requests and classes without one.",
    "slo_tpot_ms": "Limit on the time between tokens in milliseconds, likewise.",
    "max_queue": "Requests that may wait. Further ones are refused with 429.",
    "enable_prefix_caching": "Reuse the KV of prefixes that were computed before.",
    "prefix_sharing": "How a rank finds prefixes in its own pages. hash: whole blocks, by their keys; radix: "
    "pages, by their tokens; off: it always takes them from the pool.",
    "preemption": "What happens to a sequence when a rank has no free page. recompute: its KV is computed "
    "again later; swap: its KV waits in the pool.",
    "kv_events_config": "Publish the blocks that the pool stores and removes. JSON in vLLM's format.",
    "classes": 'Service classes in JSON, as {"interactive": {"weight": 4, "cache_share": 0.5, '
    '"slo_ttft_ms": 500, "slo_tpot_ms": 50}}, the highest first. In a TOML file: [classes.NAME]. By default '
    "interactive, standard and batch, which protect nothing.",
    "tenants": f'Clients with API keys of their own in JSON, as {{"alice": {{"key": "...", "class": '
    f'"batch"}}}}. In a TOML file: [tenants.NAME]. Prefer the variable {TENANTS}.',
    "record": "Write every event of the control plane to a new file, for `mooncake-lite replay-events`. "
    "The file contains keys, lengths, digests and names of tenants, and no text.",
    "trace": "Write steps, transfers and waits of all ranks to a new file, which Perfetto opens. The file is "
    "made when the cluster ends. It contains request ids, lengths and times, and no text.",
    "batch_invariant": "Compute each sequence to the same bits whatever shares its step. Decoding is slower.",
    "threads": "Threads of each rank that computes. 0 chooses by cores and ranks (see doctor).",
    "dead_after_s": "Seconds of silence after which a suspended rank, a rank on another host or the "
    "conductor counts as dead. A rank on rank 0's host that runs but does not answer has three times as "
    "long.",
    "start_timeout_s": "Longest start, in seconds.",
}

SIZES = ("pool_bytes", "lend_bytes", "ssd_bytes", "kv_cache_bytes", "staging_bytes")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one flag per field of ServeConfig; unset ones arrive as None."""
    hints = typing.get_type_hints(ServeConfig)
    for field in reversed(fields(ServeConfig)):
        if field.name == "model":
            continue
        command = _option(field.name, hints[field.name], field.default)(command)
    return command


def _option(name: str, hint: Any, default: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = "--" + name.replace("_", "-")
    has_default = default not in ("", (), False, BY_MODE)
    text = HELP[name] + (f"  [default: {_shown(name, default)}]" if has_default else "")
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if name == "api_key" or name in TABLES:
        metavar = "JSON" if name in TABLES else "KEY"
        return click.option(flag, name, default=None, envvar=SECRETS.get(name), metavar=metavar, help=text)
    if name == "mpi_arg":
        return click.option(flag, name, multiple=True, metavar="WORDS", help=text)
    if name in SIZES:
        return click.option(flag, name, default=None, metavar="SIZE", help=text)
    if typing.get_origin(hint) is typing.Literal:
        return click.option(flag, name, default=None, type=click.Choice(typing.get_args(hint)), help=text)
    return click.option(flag, name, default=None, type=type(default), help=text)


def _shown(name: str, default: Any) -> str:
    return f"{default >> 20}MiB" if name in SIZES else str(default).lower()


def build_config(model: str | None, flags: dict[str, Any], file: Path | None) -> ServeConfig:
    """The configuration of flags over a file over defaults.

    Raises ConfigError for an unknown key, a wrong type or a value out of range.
    """
    values = read_toml(file) if file else {}
    _refuse_empty(values, f"config file {file}")
    _refuse_zero_limits(values, f"config file {file}")
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    mode = {name: given[name] for name in ("mode",) if name in given}  # which keys fit together depends on it
    config_from({**values, **mode}, f"config file {file}")  # so that its own errors name it
    _refuse_empty(given, "flags")
    _refuse_zero_limits(given, "flags")
    if model is not None:
        given["model"] = model
    for name in given:
        values.pop(name.replace("_", "-"), None)
    config = config_from({**values, **given}, "flags")
    return _with_absolute_paths(config)


def _refuse_empty(values: dict[str, Any], source: str) -> None:
    """Raises ConfigError for an empty name or key, which an unset variable leaves."""
    for name, value in values.items():
        if name.replace("-", "_") in ("served_model_name", "api_key") and not str(value).strip():
            raise ConfigError(f"{source}: {name} is empty; give one, or leave it out")


def _refuse_zero_limits(values: dict[str, Any], source: str) -> None:
    """Raises ConfigError for a limit of 0 on latency. No request meets it, and it is no way to set none."""
    found = {name.replace("-", "_"): value for name, value in values.items()}
    for name in ("slo_ttft_ms", "slo_tpot_ms"):
        if found.get(name) == 0:
            raise ConfigError(f"{source}: {name}=0: a limit must be above 0; leave it out for no limit")


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Ranks may start in another folder than this command."""
    changes: dict[str, Any] = {}
    for name in ("ssd_dir", "record", "trace", "profile"):
        path = getattr(config, name)
        is_name = name == "profile" and os.sep not in path and not Path(path).exists()  # of a shipped one
        if path and not is_name:
            changes[name] = str(Path(path).expanduser().absolute())
    if os.sep in config.model or config.model in (".", ".."):
        changes["model"] = str(Path(config.model).expanduser().absolute())
    return config_from({**config.to_dict(), **changes}, "flags") if changes else config


@click.command()
@click.argument("model", required=False)
@options
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file with options under the names of the flags. Flags take precedence.",
)
@click.option("--dry-run", is_flag=True, help="Print the mpirun command line and exit.")
def serve(model: str | None, file: Path | None, dry_run: bool, **flags: Any) -> int:
    """Start a cluster: a conductor, ranks that compute or store, and an OpenAI-compatible server.

    MODEL is the name of a pulled model or a Hugging Face folder, by default SmolLM2-135M-Instruct. Outside of
    mpirun the command starts mpirun. Inside mpirun (mpirun -n 4 mooncake-lite serve ...) it becomes a rank.
    SIGTERM and Ctrl-C stop the cluster within 5 s with exit code 0. A second Ctrl-C kills it at once (130).
    If any rank is lost, the whole cluster ends with exit code 1.
    """
    config = build_config(model, flags, file)
    if world_from_environment() is not None and not dry_run:
        from mooncake_lite.rank.start import run

        return run(config)
    if dry_run:
        return _print_line(config)
    from mooncake_lite.launch.launcher import Launcher
    from mooncake_lite.launch.preflight import preflight

    for warning in preflight(config):
        click.echo(f"mooncake-lite: warning: {warning}", err=True)
    return Launcher(config).run()


def _print_line(config: ServeConfig) -> int:
    from mooncake_lite.launch.machine import find_mpirun
    from mooncake_lite.launch.mpirun import dry_run

    click.echo(dry_run(find_mpirun(), config))
    return 0
