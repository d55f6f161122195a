"""Recordings: every event of a run's control plane, its time, and a digest of its effects.

Written by the conductor role (`serve --record FILE`), read by `mooncake-lite replay-events`. It holds keys,
lengths, digests, names of tenants and sessions, and no text of prompts. Explained in docs/explain/control.md.
The file, integers little-endian:

    0     8        16           16 + n
    | magic | frame | frame | ...        magic   "MLEVENT\n"
            `-- u32 n | n bytes of MessagePack
    the first frame     Header: format, project version, configuration of the control plane
    each later frame    Entry: time, XXH3-64 of the MessagePack encoding of the list of effects, event
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from xxhash import xxh3_64_intdigest

from mooncake_lite import __version__
from mooncake_lite.control import ControlConfig
from mooncake_lite.control.effects import Effect
from mooncake_lite.control.events import AnyEvent, Event
from mooncake_lite.errors import RecordingError

MAGIC = b"MLEVENT\n"
FORMAT = 3
"""Incremented when an old reader would misread a new file."""

LENGTH_NBYTES = 4
FRAME_LIMIT_NBYTES = 64 << 20
"""A message has at most 8 MiB, and an event less than its message. A longer frame is damage."""

FLUSH_NBYTES = 256 << 10
FLUSH_S = 0.5
"""Longest time between writes while events arrive. `kill -9` loses the events since the last write."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a recording."""

    format: int
    version: str
    config: ControlConfig


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One event of a recording. digest: None when the control plane raised instead of giving effects."""

    now: float
    digest: int | None
    event: AnyEvent


class Digester:
    """Digests lists of effects: XXH3-64 (seed 0) of their MessagePack encoding."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._scratch = bytearray()

    def digest(self, effects: Sequence[Effect]) -> int:
        """Return the digest of these effects in their order."""
        self._encoder.encode_into(effects, self._scratch)
        return xxh3_64_intdigest(self._scratch)


class Recorder:
    """Writes a recording. Call `record` per event, `flush` when idle, and `close` at the end.

    problem   why the recording has ended early, or ""
    """

    def __init__(self, path: Path, config: ControlConfig) -> None:
        """Create the file, readable by its user only. Raises RecordingError when that is impossible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise refusal(path, error) from None
        self._digester = Digester()
        self._encoder = msgspec.msgpack.Encoder()
        self._frame = bytearray()
        self._buffer = bytearray(MAGIC)
        self._flushed_at = float("-inf")
        self._path = path
        self.problem = ""
        self._add(Header(FORMAT, __version__, config))
        self.flush()

    def record(self, event: Event, now: float, effects: Sequence[Effect] | None) -> None:
        """Add one event. effects: the result of `Control.on`; None if it raised."""
        self._add((now, None if effects is None else self._digester.digest(effects), event))
        if now - self._flushed_at >= FLUSH_S or len(self._buffer) >= FLUSH_NBYTES:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Pass recorded events to the operating system. A full disk ends the recording, not the cluster."""
        data, self._buffer = self._buffer, bytearray()
        if self.problem:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.problem = f"recording {self._path} ends here: {error.strerror}; the cluster continues"
            print(f"mooncake-lite: {self.problem}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        os.close(self._file)

    def _add(self, content: object) -> None:
        frame = self._frame
        self._encoder.encode_into(content, frame, LENGTH_NBYTES)
        frame[:LENGTH_NBYTES] = (len(frame) - LENGTH_NBYTES).to_bytes(LENGTH_NBYTES, "little")
        self._buffer += frame


def refusal(path: Path, error: OSError) -> RecordingError:
    """Return the error that says why no recording can be made at `path`, with the fix."""
    if error.errno in (errno.EEXIST, errno.ELOOP):
        return RecordingError(
            f"record={str(path)!r} exists already; remove it, or choose another file with --record"
        )
    return RecordingError(
        f"record={str(path)!r} cannot be made ({error.strerror}); choose a file in a folder that is there "
        "and writable with --record"
    )


class Recording:
    """Reads a recording: its header at once, its entries one by one.

    header      configuration and versions
    num_bytes   length of the file
    read_bytes  of it so far
    torn_bytes  after the last entry: what is there of a frame that was not written to its end, because the
                run was killed; 0 before the last entry is read
    """

    def __init__(self, path: Path) -> None:
        """Open a file and read its header. Raises RecordingError if it is not a recording."""
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            magic = self._file.read(len(MAGIC))
        except OSError as error:
            raise RecordingError(f"recording {path} cannot be read: {error.strerror}") from None
        self.torn_bytes = 0
        self.read_bytes = len(magic)
        try:
            if magic != MAGIC:
                raise RecordingError(f"{path} is not a recording; give a file that `serve --record` wrote")
            self.header = self._header()
        except RecordingError:
            self._file.close()
            raise

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in their order. Raises RecordingError for a damaged frame, with its offset."""
        decoder = msgspec.msgpack.Decoder(Entry)
        while True:
            offset = self.read_bytes
            frame = self._next_frame()
            if frame is None:
                return
            try:
                entry = decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise self._damaged(offset, str(error)) from None
            yield entry

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _header(self) -> Header:
        frame = self._next_frame()
        if frame is None:
            raise RecordingError(
                f"recording {self._path} ends before its header: the run was killed at its start"
            )
        try:
            found, version = msgspec.msgpack.decode(frame, type=list)[:2]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise self._damaged(len(MAGIC), "no header") from None
        if found != FORMAT:
            raise RecordingError(
                f"recording {self._path} has format {found}, mooncake-lite {__version__} reads {FORMAT}; "
                f"replay it with mooncake-lite {version}, which made it"
            )
        try:
            return msgspec.msgpack.decode(frame, type=Header)
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(len(MAGIC), str(error)) from None

    def _next_frame(self) -> bytes | None:
        """Return the next frame; None at the end of the file, also when the last frame is torn."""
        start = self.read_bytes
        length = self._file.read(LENGTH_NBYTES)
        nbytes = int.from_bytes(length, "little")
        if len(length) == LENGTH_NBYTES and nbytes > FRAME_LIMIT_NBYTES:
            raise self._damaged(start, f"a frame of {nbytes} bytes, the limit is {FRAME_LIMIT_NBYTES}")
        frame = self._file.read(nbytes) if len(length) == LENGTH_NBYTES else b""
        if len(length) < LENGTH_NBYTES or len(frame) < nbytes:
            self.torn_bytes = len(length) + len(frame)
            return None
        self.read_bytes = start + LENGTH_NBYTES + nbytes
        return frame

    def _damaged(self, offset: int, problem: str) -> RecordingError:
        return RecordingError(f"recording {self._path} is damaged at byte {offset}: {problem}")
