"""Reads traces in the forms in which they are published. The first line tells the form.

    Mooncake, Bailian          JSON lines with the ids of blocks of 512 or 16 tokens
    Azure, BurstGPT            CSV: times and lengths, nothing about shared prefixes
    ShareGPT                   JSON: the texts of conversations, no times

Used by all commands that take a trace. What a form lacks is said, and made up only where `Assumed` says so.
Explained in docs/how-to/make-a-workload.md.
"""

from __future__ import annotations

import csv
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from io import BufferedReader
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import TraceError
from mooncake_lite.workloads.arrivals import interleaved, retimed
from mooncake_lite.workloads.traces import (
    BLOCK_TOKENS,
    MOST_MS,
    Trace,
    TraceRequest,
    checked,
    lines_of,
    naming,
    opened,
    trace_of,
)

CHARACTERS_PER_TOKEN = 4
"""Of texts: a rule of thumb for English, whatever the model. Other languages have more tokens."""

MOST_TEXT_MIB = 2048
"""Of a file of conversations that is one list: it is read as a whole."""

TURN_GAP_S = 40.0
"""Mean time from one question of a conversation to the next, as in `simulator/sessions.py`."""

ANSWERERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
"""Who answers in conversations. All others ask."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
"""Of a prompt or an answer: ids are made up for prompts, so the most is what a model could have, not more."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS / 1e3)]


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is made up where a form lacks it.

    rate     requests per second, where there are no times; 0: such a file is refused
    prefix   tokens with which all prompts begin, where nothing is known about shared prefixes
    """

    rate: float = 0.0
    prefix: int = 0


@dataclass(slots=True)
class Read:
    """A trace, and sentences about what its form lacks, which its user has to be told."""

    trace: Trace
    notes: list[str] = field(default_factory=list)


class Row(msgspec.Struct, frozen=True):
    """A line of a form that is not Mooncake's. A prompt may have no tokens: its request is left out.

    form, block_tokens   of the class
    at                   seconds, or a date
    hash_ids             None: not known
    """

    form: ClassVar[str]
    block_tokens: ClassVar[int] = BLOCK_TOKENS
    at: Any
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]] | None = None

    @property
    def time_s(self) -> float:
        """Return the time of arrival, in seconds since a moment that all lines share."""
        if isinstance(self.at, datetime):
            return (self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)).timestamp()
        return float(self.at)


class Bailian(Row, frozen=True):
    """github.com/alibaba-edu/qwen-bailian-usagetraces-anon: ids of whole prefixes, as Mooncake has them."""

    form = "Bailian"
    block_tokens = 16
    at: Seconds = msgspec.field(name="timestamp")


class Azure(Row, frozen=True):
    """github.com/Azure/AzurePublicDataset, 2023 and 2024. Times without a zone are of one zone."""

    form = "Azure"
    at: datetime = msgspec.field(name="TIMESTAMP")
    input_length: Tokens = msgspec.field(name="ContextTokens")
    output_length: Tokens = msgspec.field(name="GeneratedTokens")


class BurstGPT(Row, frozen=True):
    """github.com/HPMLL/BurstGPT. Of failed requests the answer, or both, have no tokens."""

    form = "BurstGPT"
    at: Seconds = msgspec.field(name="Timestamp")
    input_length: Tokens = msgspec.field(name="Request tokens")
    output_length: Tokens = msgspec.field(name="Response tokens")


class Message(msgspec.Struct, frozen=True):
    """What one side of a conversation said."""

    sender: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct, frozen=True):
    """One conversation of a file as ShareGPT's."""

    conversations: list[Message]


def read_any(path: Path, assumed: Assumed = Assumed(), most: int | None = None) -> Read:
    """Read a trace of any form.

    most   requests that are read, from the front; None: all

    Raises TraceError, which names the file and the line, for all that `read_trace` refuses, for a file of no
    known form, and for one without times where `assumed` has no rate.
    """
    with opened(path) as file:
        if file.peek().removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
            return _conversations(path, _whole(path, file), assumed)
        lines = lines_of(path, file)
        place, first = next(lines, ("", b"{}"))
        lines = chain([(place, first)] if place else [], lines)
        if not first.lstrip().startswith(b"{"):
            return _rows(path, *_csv(lines), assumed, most)
        if b'"conversations"' in first:
            return _conversations(path, (one for _, one in _decoded(lines, Conversation)), assumed)
        if b'"chat_id"' in first:
            return _rows(path, Bailian, _decoded(lines, Bailian), assumed, most)
        return Read(trace_of(path, islice(lines, most)))


def _decoded(lines: Iterable[tuple[str, bytes]], kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, line) of lines of JSON."""
    decoder = msgspec.json.Decoder(kind)
    for place, line in lines:
        with naming(place):
            decoded = decoder.decode(line)
        yield place, decoded


def _csv(lines: Iterator[tuple[str, bytes]]) -> tuple[type[Row], Iterator[tuple[str, Row]]]:
    """Return the form that has the columns of the first line, and (place, line) of all that follow."""
    place, first = next(lines)
    columns, wanted = _cells(place, first), list[str]()
    for form in (Azure, BurstGPT):
        names = [one.encode_name for one in msgspec.structs.fields(form) if one.required]
        if set(names) <= set(columns):
            return form, ((at, _row(form, columns, at, line)) for at, line in lines)
        wanted.append(f"{', '.join(names)} ({form.form})")
    raise TraceError(
        f"{place}: no known form of a trace begins like this; begin with JSON, or with the names of columns: "
        + " or ".join(wanted)
    )


def _row(form: type[Row], columns: Sequence[str], place: str, line: bytes) -> Row:
    """Return one line of a CSV file."""
    cells = _cells(place, line)
    if len(cells) != len(columns):
        raise TraceError(f"{place}: {len(cells)} cells, and the first line names {len(columns)} columns")
    with naming(place):
        return msgspec.convert(dict(zip(columns, cells)), form, strict=False)


def _cells(place: str, line: bytes) -> list[str]:
    """Return the cells of a line of CSV without the blanks around them."""
    with naming(place):
        text = line.decode()
    try:
        return [cell.strip() for cell in next(csv.reader([text.rstrip("\r\n")], strict=True), [])]
    except csv.Error as error:
        raise TraceError(f"{place}: {error}") from None


def _rows(
    path: Path, form: type[Row], rows: Iterator[tuple[str, Row]], assumed: Assumed, most: int | None
) -> Read:
    """Make a trace of lines, with times from the first one on."""
    made, empty, unknown, begin_s, fresh = list[TraceRequest](), 0, 0, None, count(1 << 62)
    size, known = form.block_tokens, range(assumed.prefix // form.block_tokens)
    for place, row in rows:
        if not row.input_length:
            empty += 1
            continue
        begin_s = row.time_s if begin_s is None else begin_s
        ids = row.hash_ids
        if ids is None:
            unknown += 1
            begin, blocks = known[: row.input_length // size], -(-row.input_length // size)
            ids = [*begin, *islice(fresh, blocks - len(begin))]
        time_ms = round(1e3 * (row.time_s - begin_s), 3)
        if made and time_ms < made[-1].timestamp:
            early_ms = made[-1].timestamp - time_ms
            raise TraceError(f"{place}: it is {early_ms:g} ms before an earlier line; sort the lines by time")
        request = TraceRequest(time_ms, row.input_length, row.output_length, ids)
        made.append(checked(request, size, place, made))
        if len(made) == most:
            break
    if not made:
        raise TraceError(f"{path}: there is no request in it; {form.form}'s form has one per line")
    shared = f"the first {assumed.prefix} tokens of all are assumed to be" if assumed.prefix else "no two are"
    notes = [
        f"{path}: the prefixes of {unknown:,} prompts are not known ({form.form}); {shared} equal",
        f"{path}: {empty:,} requests without a prompt are left out",
    ]
    return Read(Trace(made, form.block_tokens), [note for note, n in zip(notes, (unknown, empty)) if n])


def _whole(path: Path, file: BufferedReader) -> list[Conversation]:
    """Return the conversations of a file that is one list."""
    text = b"".join(islice(iter(partial(file.read, 1 << 20), b""), MOST_TEXT_MIB + 1))
    if len(text) > MOST_TEXT_MIB << 20:
        raise TraceError(
            f"{path}: more than {MOST_TEXT_MIB:,} MiB; put each conversation on a line of its own"
        )
    with naming(str(path)):
        return msgspec.json.decode(plain_text(text), type=list[Conversation])


def _conversations(path: Path, found: Iterable[Conversation], assumed: Assumed) -> Read:
    """Make a trace of texts. Equal beginnings are shared; each answer is in the prompts that follow it."""
    if not assumed.rate:
        raise TraceError(
            f"{path}: conversations have no times; give the requests per second with --assume-rate"
        )
    size, named = BLOCK_TOKENS * CHARACTERS_PER_TOKEN, dict[tuple[int, str], int]()

    def turns(conversation: Conversation) -> Iterator[tuple[float, TraceRequest]]:
        ids, rest = [-1], ""
        for message in conversation.conversations:
            length = BLOCK_TOKENS * (len(ids) - 1) + _tokens(rest)
            if message.sender.lower() in ANSWERERS and length:
                last = [named.setdefault((ids[-1], rest), len(named))] if rest else []
                yield TURN_GAP_S, TraceRequest(0, length, _tokens(message.value), [*ids[1:], *last])
            rest += message.value
            full = len(rest) // size * size
            for begin in range(0, full, size):
                ids.append(named.setdefault((ids[-1], rest[begin : begin + size]), len(named)))
            rest = rest[full:]

    sessions = (chain([first], rest) for one in found for rest in [turns(one)] for first in islice(rest, 1))
    made = Trace(list(interleaved(sessions, max(1, round(assumed.rate * TURN_GAP_S)))))
    if not made.requests:
        raise TraceError(f"{path}: there is no question with an answer in it")
    note = (
        f"{path}: times are made up, at {assumed.rate:g} requests/s; {CHARACTERS_PER_TOKEN} characters of "
        "text count as a token"
    )
    return Read(retimed(made, "poisson", assumed.rate, 0), [note])


def _tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def coarsened(trace: Trace) -> Trace:
    """Return a trace with blocks of 512 tokens, as Mooncake's. Shorter shared prefixes are no longer seen.

    An id names a whole prefix. So the last of the small blocks in a block of 512 names that one, too.
    """
    by = BLOCK_TOKENS // trace.block_tokens

    def coarse(request: TraceRequest) -> TraceRequest:
        partial = request.hash_ids[-1:] if request.input_length % BLOCK_TOKENS else []
        full = request.hash_ids[by - 1 :: by][: request.input_length // BLOCK_TOKENS]
        return msgspec.structs.replace(request, hash_ids=[*full, *partial])

    return Trace([coarse(request) for request in trace.requests])
