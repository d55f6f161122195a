"""`mooncake-lite explain REQUEST_ID`: every instance that was compared for a request, with its terms.

Mounted by `mooncake_lite.cli`. Asks a running conductor (`pool/live.py`), or replays a recording up to the
decision. The terms are those of `scheduler.placement`. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path

import click
import msgspec

from mooncake_lite.conductor.recording import Digester, Entry, Recording
from mooncake_lite.config.options import write_out
from mooncake_lite.control import Control
from mooncake_lite.control.effects import Decided, Forget, Reject
from mooncake_lite.control.events import RequestArrived
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.errors import RecordingError, UserError
from mooncake_lite.messages.explain import Explain, Explained
from scheduler import Terms
from scheduler.placement import OTHER_SCORES
from scheduler.placement.choose import explain
from scheduler.placement.decisions import Decisions
from scheduler.placement.explanation import Candidate, Explanation

SHOWN_IDS = 3


@click.command()
@click.argument("request_id")
@click.option(
    "--recording", type=click.Path(path_type=Path), metavar="FILE", help="A file of `serve --record FILE`."
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    metavar="URL|FOLDER",
    help="URL or run folder of the cluster to ask, if several of yours are running here.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write JSON to FILE instead; - is stdout.")
def command(request_id: str, recording: Path | None, cluster: Path | None, json_file: str | None) -> None:
    """Show every instance that was compared for the request REQUEST_ID, with the terms of each.

    REQUEST_ID is the `id` of an answer, and its header X-Request-Id. The command asks your running
    cluster, which keeps its last 1,000 decisions, or replays a recording up to the decision.
    """
    if recording is not None and cluster is not None:
        raise UserError("--recording and --cluster are two sources; give one of them")
    found = from_cluster(request_id, cluster) if recording is None else from_recording(request_id, recording)
    if json_file is None:
        _show(found)
        return
    text = msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
    if json_file == "-":
        click.echo(text, nl=False)
    else:
        write_out("--json", Path(json_file), text)


# ------------------------------------------------------------------------------ a running cluster


def from_cluster(request_id: str, folder: Path | None) -> Explanation:
    """Ask a conductor. Raises UserError for a request that it does not keep, or without a cluster."""
    from mooncake_lite.tools.pool.live import LIVE, live_pool, run_folder

    running = run_folder(folder or Path(LIVE), "with --cluster")
    if running is None:
        raise UserError(
            f"{folder or LIVE} is no running cluster; give the URL or the run folder of one with --cluster"
        )
    with live_pool(running) as conductor:
        answer: Explained = conductor.answer(Explain(request_id))
    if answer.explanation is None:
        raise UserError(
            f"no decision about request {request_id!r} is kept; {_known(request_id, answer.last, 'kept')}"
        )
    return answer.explanation


# ------------------------------------------------------------------------------ a recording


def from_recording(request_id: str, file: Path) -> Explanation:
    """Replay a recording up to the decision about a request. See `replay` for the errors."""
    with closing(Recording(file)) as recording:
        events = (entry.event for entry in recording.entries())
        known = [event.request_id for event in events if isinstance(event, RequestArrived)]
    if request_id not in known:
        raise UserError(
            f"{file} has no request {request_id!r}; {_known(request_id, known, 'in the recording')}"
        )
    with closing(Recording(file)) as recording:
        return replay(recording, request_id)


def replay(recording: Recording, request_id: str) -> Explanation:
    """Apply events until a request that is in the recording has been decided.

    Raises RecordingError if the file is damaged, or if a replay has other effects than the recorded run.
    """
    config, digester = recording.header.config, Digester()
    decisions = Decisions(config.placement)
    control = Control(config, decisions.choose)
    for number, entry in enumerate(recording.entries(), 1):
        try:
            effects = control.on(entry.event, entry.now)
        except Exception as error:  # a bug: the recorded run ended there too, or a newer version has it
            raise RecordingError(f"event {number} raises {type(error).__name__}: {error}") from None
        if digester.digest(effects) != entry.digest:
            raise RecordingError(
                f"event {number} has other effects here than in the recorded run, which was of mooncake-lite "
                f"{recording.header.version}; `mooncake-lite replay-events` shows the difference"
            )
        for effect in effects:
            match effect:
                case Decided() if effect.request_id == request_id:
                    decisions.placed(request_id)
                    return _kept(decisions, request_id)
                case Reject() if effect.request_id == request_id:
                    decisions.refused(request_id, effect.reason)
                    return _with_candidates(_kept(decisions, request_id), control, entry)
                case Forget() if effect.request_id == request_id:
                    return _kept(decisions, request_id)
    return _kept(decisions, request_id)


def _kept(decisions: Decisions, request_id: str) -> Explanation:
    found = decisions.explain(request_id)
    return found or Explanation(request_id, decisions.policy, "waits", "others wait", [])


def _with_candidates(found: Explanation, control: Control, entry: Entry) -> Explanation:
    """Add what would have been compared for a request that was refused before."""
    event = entry.event
    if found.candidates or not isinstance(event, RequestArrived):
        return found
    config = control.config
    record = RequestRecord.of(event, config.classes[event.class_id], entry.now)
    request = record.as_request(control.state, config.block_layout.block_tokens)
    rows = explain(config.placement, control.state, request, entry.now)
    return msgspec.structs.replace(found, candidates=rows)


def _known(request_id: str, ids: Sequence[str], where: str) -> str:
    """Say which requests there are: those with a similar id, else the last ones."""
    if not ids:
        return f"none is {where}"
    near = get_close_matches(request_id, ids, n=SHOWN_IDS) or list(ids[-SHOWN_IDS:])
    return f"{len(ids):,} are {where}, among them {', '.join(near)}"


# ------------------------------------------------------------------------------ output


def _show(found: Explanation) -> None:
    from mooncake_lite.config.progress import plain_table, wide_console

    click.echo(_headline(found))
    if not found.candidates:
        return
    unit = OTHER_SCORES.get(found.policy, "ms")
    times = ("TTFT ms", "queue ms", "transfer ms", "start ms", "compute ms")
    others = ("near", "reused", "best", "fetch", "batch", "TBT ms")
    names = ("prefill", "decode", f"score {unit}".strip(), *times, *others)
    table = plain_table(*names, no_wrap=True)
    for row in found.candidates:
        table.add_row(*_cells(row, unit))
    wide_console().print(table)
    click.echo(
        "times are predicted. start: loads from DRAM of its node, and messages; a part of TTFT, and not of "
        "the score. near, reused, best: leading blocks near the instance, not computed there, and anywhere "
        "in the pool. fetch: blocks that come from other nodes or from SSD, in the time of the transfer; no: "
        "none may"
    )


def _headline(found: Explanation) -> str:
    start = f"{found.request_id}: "
    if found.outcome == "placed":
        chosen = found.candidates[0]
        terms, fetched = chosen.terms, _fetched(chosen.terms)
        return (
            f"{start}{found.policy} chose prefill {chosen.prefill} and decode {chosen.decode}\n"
            f"of {terms.reused_blocks} reused blocks {terms.reused_blocks - fetched} were near, and "
            f"{fetched} were fetched (a transfer of {1e3 * terms.transfer_s:,.1f} ms)"
        )
    if found.outcome == "refused":
        return f"{start}refused: {found.reason}"
    return f"{start}waits: {found.reason}"


def _fetched(terms: Terms) -> int:
    """Return the blocks that are reused and are not near."""
    return max(0, terms.reused_blocks - terms.near_blocks)


def _cells(row: Candidate, unit: str) -> list[str]:
    terms = row.terms
    times = terms.ttft_s, terms.queue_s, terms.transfer_s, terms.start_s, terms.prefill_s
    score = f"{1e3 * terms.score:,.1f}" if unit == "ms" else f"{terms.score:.4g}"
    return [
        str(row.prefill), str(row.decode), score, *(f"{1e3 * each:,.1f}" for each in times),
        str(terms.near_blocks), str(terms.reused_blocks), str(terms.best_blocks),
        str(_fetched(terms)) if row.fetch else "no", str(terms.decode_batch), f"{1e3 * terms.tbt_s:,.1f}",
    ]  # fmt: skip
