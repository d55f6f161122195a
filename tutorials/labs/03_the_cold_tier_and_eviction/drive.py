"""The child's side of 3a, 3b and 3e: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import store.ssd.segment_file
from mooncake_lite.labs.counting import CountedLookUps
from store.allocator import RangeAllocator, padded_size
from store.directory import Directory
from store.errors import BadBlock, PoolFull, SegmentFileError, UnknownObject
from store.layout import BlockLayout
from store.objects import PoolObject
from store.policies.contract import BlockFacts
from store.policies.lru import LRU

# ------------------------------------------------------------------------------------------- 3a


class CountedSizes(MutableSequence[int]):
    """A list that counts how many of its entries are read."""

    def __init__(self, entries: list[int]) -> None:
        self._entries = entries
        self._read = 0

    def __getitem__(self, place: Any) -> Any:
        found = self._entries[place]
        self._read += len(found) if isinstance(place, slice) else 1
        return found

    def __setitem__(self, place: Any, value: Any) -> None:
        self._entries[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._entries[place]

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, index: int, value: int) -> None:
        """Insert an entry."""
        self._entries.insert(index, value)

    def copy(self) -> list[int]:
        """Return all entries."""
        return self[:]  # type: ignore[no-any-return]


def extents(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play a history of ranges in one segment, and tell the free ranges after each of the `last` steps.

    Steps: ["fill", nbytes] takes one range, ["extents", nbytes] calls the region, ["free", step] frees what
    that step got, each range by itself. The history ends after a step that raised. An extent whose offset is
    None has the offset -1.
    """
    allocator = RangeAllocator(inputs["capacity"], inputs["alignment"])
    allocator._sizes = sizes = CountedSizes(allocator._sizes)  # type: ignore[assignment]
    books = [CountedLookUps(getattr(allocator, name)) for name in ("_used", "_starts", "_ends", "_holes")]
    allocator._used, allocator._starts, allocator._ends, allocator._holes = books
    taken: list[Any] = []
    seen = []
    first = len(inputs["steps"]) - inputs["last"]
    for place, (verb, number) in enumerate(inputs["steps"]):
        before = sizes._read + sum(book._walked for book in books)
        got: Any = None
        raised = ""
        try:
            if verb == "free":
                for offset, _ in taken[number] or ():
                    allocator.free(offset)
            elif verb == "fill":
                got = [[allocator.allocate(number), number]]
            else:
                got = allocator.allocate_extents(number)
                got = None if got is None else [[-1 if at is None else at, size] for at, size in got]
        except UnknownObject as error:
            raised = str(error)
        taken.append(got)
        if place < first and not raised:
            continue
        holes = sorted([offset, size] for offset, size in dict.items(allocator._starts))
        read = sizes._read + sum(book._walked for book in books) - before
        seen.append({"got": got, "holes": holes, "read": read, "raised": raised})
        if raised:
            break
    return seen


# ------------------------------------------------------------------------------------------- 3b


class WatchedLRU(LRU):
    """The default policy. It remembers what it is told about new blocks: (key, parent, time) of each."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._told: list[tuple[Any, Any, Any]] = []

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Remember it."""
        self._told.append((item, getattr(facts, "parent", None), now))
        super().on_insert(item, facts, now)


def digest_of(key: int) -> int:
    """Return the digest of the block of a key. No key of a test is equal to a digest."""
    return 2**32 + key


class Puts:
    """A directory to which a history of puts is played. A put is named by the number of its step.

    Step n takes place at n seconds. The parent of a block has the key before its own.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.layout = BlockLayout(1, 1, 4, inputs["head_dim"], 4)
        share = inputs["max_unsaved_share"]
        self.directory = Directory(self.layout, policy=WatchedLRU, max_unsaved_share=share)
        for rank, blocks, saver in inputs["segments"]:
            self.directory.add_segment(rank, blocks * padded_size(self.layout.nbytes), 0, saver=saver)
        self.objects: dict[int, PoolObject] = {}
        self.step = 0

    @property
    def now(self) -> float:
        """Return the time of this step."""
        return float(self.step)

    def put(self, owner: str, rank: int, key: int | None) -> str:
        """Allocate a block; tell whether a place was found."""
        keyed = {} if key is None else {"key": key, "digest": digest_of(key), "parent": key - 1}
        try:
            obj = self.directory.allocate(owner, self.layout.nbytes, now=self.now, rank=rank, **keyed)
        except PoolFull:
            return "full"
        self.objects[self.step] = obj
        return "allocated"

    def copy(self, owner: str, rank: int, put: int) -> str:
        """Allocate a copy of a block on another segment."""
        source = self.objects[put].object_id
        self.objects[self.step] = self.directory.put_copy(source, now=self.now, owner=owner, rank=rank)
        return "allocated"

    def end(self, put: int) -> str:
        """Report that a block was written."""
        is_visible = self.directory.put_end(self.objects[put].object_id, [1], self.now)
        return "visible" if is_visible else "private"

    def find(self, key: int) -> str:
        """Look a key up, and touch it."""
        found = self.directory.lookup([key], [digest_of(key)], self.now)
        return f"{found[0].tier} of rank {found[0].rank}" if found else "not found"

    def release(self, owner: str) -> str:
        """End a request."""
        self.directory.release(owner, self.now)
        return ""

    def take(self) -> str:
        """Take what tiers have to save."""
        taken = self.directory.take_saves()
        return "; ".join(f"rank {rank}: {[obj.key for obj in objects]}" for rank, objects in taken.items())

    def saved(self, rank: int, key: int) -> str:
        """Report that a block is in a tier's open file."""
        self.directory.saved(rank, [key])
        return ""

    def durable(self, rank: int, key: int) -> str:
        """Report that a block is in a tier's sealed file."""
        self.directory.durable(rank, [key])
        return ""

    def play(self, verb: str, more: list[Any]) -> dict[str, Any]:
        """Make a step, and tell the books of the directory after it."""
        said = getattr(self, verb)(*more)
        self.step += 1
        directory = self.directory
        self.objects = {put: obj for put, obj in self.objects.items() if directory.has(obj.object_id)}
        of = {obj.object_id: put for put, obj in self.objects.items()}
        events = [
            f"{type(event).__name__} {event.key} {event.tier} of rank {event.rank}"
            for event in directory.drain_events()
        ]
        return {
            "said": said,
            "visible": {str(key): of[obj.object_id] for key, obj in directory._visible.items()},
            "states": {str(put): obj.state.value for put, obj in self.objects.items()},
            "waiting": [put for put, obj in self.objects.items() if obj.unsaved],
            "policies": {str(rank): sorted(segment.policy) for rank, segment in directory._segments.items()},
            "told": [told for segment in directory._segments.values() for told in new_of(segment.policy)],
            "used": {str(put): obj.last_use_s for put, obj in self.objects.items()},
            "events": events,
            "owners": sorted(directory.active_owners()),
            "skipped": directory.counters["saves_skipped"],
            "copies": directory.counters["copies_stored"],
        }


def new_of(policy: WatchedLRU) -> list[tuple[Any, Any, Any]]:
    """Return what a policy was told about new blocks since the last call."""
    told, policy._told = policy._told, []
    return told


def puts(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play a history of puts, and tell the books after each step, or after those of one verb, `only`.

    Steps: ["put", owner, rank, key], ["copy", owner, rank, put], ["end", put], ["find", key],
    ["release", owner], ["take"], ["saved", rank, key], ["durable", rank, key]. The history ends before the
    report about a block that got no place.
    """
    played = Puts(inputs)
    seen = []
    for verb, *more in inputs["steps"]:
        if verb == "end" and more[0] not in played.objects:
            break
        after = played.play(verb, more)
        if inputs["only"] in ("", verb):
            seen.append(after)
    return seen


# ------------------------------------------------------------------------------------------- 3e


class WatchedOs:
    """`os` in the file of `open_sealed`: counts the bytes that are read, and remembers what is opened."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.opened: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any, **named: Any) -> int:
        """Open a file."""
        self.opened.append(os.open(*arguments, **named))
        return self.opened[-1]

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        """Count the bytes of a read."""
        found = os.pread(fd, nbytes, at)
        self.read_bytes += len(found)
        return found

    def read(self, fd: int, nbytes: int) -> bytes:
        """Count the bytes of a read."""
        found = os.read(fd, nbytes)
        self.read_bytes += len(found)
        return found

    def preadv(self, fd: int, buffers: Any, at: int) -> int:
        """Count the bytes of a read."""
        found = os.preadv(fd, buffers, at)
        self.read_bytes += found
        return found

    def left_open(self) -> int:
        """Close what was left open; return how many files those were."""
        count = 0
        for fd in set(self.opened):
            try:
                os.close(fd)
            except OSError:
                continue
            count += 1
        return count


def edited(data: bytes, edits: list[list[Any]]) -> bytes:
    """Damage the bytes of a file.

    Edits: ["flip", byte, bit], ["cut", bytes left], ["grow", bytes more], ["zero", begin, end].
    """
    changed = bytearray(data)
    for verb, *more in edits:
        if verb == "flip":
            changed[more[0]] ^= 1 << more[1]
        elif verb == "cut":
            del changed[more[0] :]
        elif verb == "grow":
            changed += bytes(more[0])
        else:
            changed[more[0] : more[1]] = bytes(more[1] - more[0])
    return bytes(changed)


def opened(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Open files, whole and damaged, and tell of each what came back.

    file                  its bytes, as base64
    edits                 what a crash or a bad disk has done to it
    kind                  "file", or "link" to one, or "missing"
    layout, fingerprint   of the model that asks; None for none
    """
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(inputs):
            path = Path(folder) / f"seg-{number:08}.h5"
            real = path.with_suffix(".real") if given["kind"] == "link" else path
            if given["kind"] != "missing":
                real.write_bytes(edited(base64.b64decode(given["file"]), given["edits"]))
            if given["kind"] == "link":
                path.symlink_to(real)
            seen.append(_opened(path, number, given))
    return seen


def _opened(path: Path, number: int, given: dict[str, Any]) -> dict[str, Any]:
    layout = BlockLayout(*given["layout"]) if given["layout"] else None
    watched = WatchedOs()
    vars(store.ssd.segment_file)["os"] = watched
    told: dict[str, Any] = {"raised": "", "message": ""}
    file = None
    try:
        file = store.ssd.segment_file.open_sealed(path, number, layout, bytes.fromhex(given["fingerprint"]))
    except (SegmentFileError, OSError) as error:
        told = {"raised": type(error).__name__, "message": str(error).replace(str(path.parent), "...")}
    finally:
        vars(store.ssd.segment_file)["os"] = os
        told["left_open"] = watched.left_open()
    told["read"] = watched.read_bytes
    if file is None:
        return told | {"returned": "None"}
    told["returned"] = type(file).__name__
    return told | {
        "named": [file.path == path, file.number == number],
        "keys": file.keys.tolist(),
        "digests": file.digests.tolist(),
        "offsets": file.offsets.tolist(),
        "checksums": file.checksums.tolist(),
        "same_kind": bool(file.same_kind),
        "blocks": file.header.blocks,
        "bad_rows": bad_rows(file) if given["reads"] else [],
    }


def bad_rows(file: store.ssd.segment_file.SealedFile) -> list[int]:
    """Read all blocks of a file; return the rows of those whose bytes are not what was written."""
    out = memoryview(bytearray(file.header.layout.nbytes))
    bad = []
    file.fd = os.open(file.path, os.O_RDONLY)
    try:
        for row in range(len(file.keys)):
            try:
                file.read_block(row, out)
            except BadBlock:
                bad.append(row)
    finally:
        os.close(file.fd)
    return bad


CALLS = {"extents": extents, "puts": puts, "opened": opened}
