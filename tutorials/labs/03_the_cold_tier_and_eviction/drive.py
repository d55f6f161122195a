"""The child's side of 3a and 3b: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from mooncake_lite.labs.counting import CountedLookUps
from store.allocator import RangeAllocator, padded_size
from store.directory import Directory
from store.errors import PoolFull, UnknownObject
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


CALLS = {"extents": extents, "puts": puts}
