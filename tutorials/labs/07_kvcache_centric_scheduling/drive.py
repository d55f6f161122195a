"""The child's side of lab 7: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import scheduler.admission.predictive
import scheduler.prefix_index
from mooncake_lite.labs.counting import CountedLookUps
from scheduler.admission.predictive import Predictive
from scheduler.decode_load import DecodeLoad
from scheduler.hot_spots import HotSpots
from scheduler.placement.kvcache_centric import KVCacheCentric
from scheduler.prefix_index import Leading, PrefixIndex, _Places

# ------------------------------------------------------------------------------------------- 7a


class CountedBits(int):
    """A set of nodes that counts operations on it, and on what comes from it.

    An operation is an arithmetic one, a comparison, or a conversion to bytes, which `_columns` makes. What
    Python reads of an index array one by one counts here, too.
    """

    count = 0


def _counted(name: str) -> Any:
    real = getattr(int, name)

    def operation(self: int, *other: Any, **named: Any) -> Any:
        CountedBits.count += 1
        found = real(self, *other, **named)
        return CountedBits(found) if type(found) is int else found

    return operation


def _read_whole(name: str) -> Any:
    """Of the number or text that comes from this, every bit can be read uncounted."""
    real = getattr(int, name)

    def operation(self: int, *given: Any) -> Any:
        CountedBits.count += self.bit_length()
        return real(self, *given)

    return operation


BINARY = ("and", "or", "xor", "lshift", "rshift", "sub", "add", "mul", "floordiv", "mod", "divmod")
OPERATIONS = [f"__{reverse}{name}__" for name in BINARY for reverse in ("", "r")]
OPERATIONS += ["__invert__", "__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]
for _name in (*OPERATIONS, "__abs__", "__pos__", "__round__", "conjugate", "to_bytes", "bit_count"):
    setattr(CountedBits, _name, _counted(_name))
for _name in ("__int__", "__index__", "__format__", "__str__", "__repr__"):
    setattr(CountedBits, _name, _read_whole(_name))
CountedBits.real = CountedBits.numerator = property(_counted("__pos__"))  # type: ignore[assignment]
CountedBits.__hash__ = int.__hash__  # type: ignore[method-assign]


class CountedColumns(np.ndarray):
    """An index array of nodes that counts each number that Python reads from it, as operations on sets."""

    def __iter__(self) -> Iterator[Any]:
        for column in super().__iter__():
            CountedBits.count += 1
            yield column

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountedBits.count += not isinstance(found, np.ndarray)
        return found

    def tolist(self) -> Any:
        """Return the same numbers; each of them is read."""
        CountedBits.count += self.size
        return super().tolist()


def near(inputs: dict[str, Any]) -> dict[str, Any]:
    """Ask for the lengths of a prompt. nodes: the columns that have each run; starts: of the runs."""
    leading = _leading(_places(inputs["nodes"]), inputs)
    with _counted_columns():
        CountedBits.count = 0
        found = leading.near_columns()
        operations = CountedBits.count
    told = array_of(found, "near_columns() returned")
    kind = f"{told.dtype} {list(told.shape)}"
    return {"lengths": _numbers(told), "kind": kind, "operations": operations}


def shared(inputs: dict[str, Any]) -> dict[str, Any]:
    """Ask for the lengths of a prompt, twice, and of the prompt with the same runs in the opposite order.

    The second prompt is asked alone, and after the first one, with which it shares the places.
    """
    starts, blocks = inputs["starts"], inputs["blocks"]
    opposite = {**inputs, "starts": [blocks - end for end in reversed([*starts[1:], blocks])]}
    places = _places(inputs["nodes"])
    leading = _leading(places, inputs)
    first = _numbers(leading.near_columns())
    runs = [{"nodes": _bits(one.nodes), "columns": one.columns().tolist()} for one in leading._places]
    told = {"first": first, "runs": runs, "starts": list(leading._starts)}
    told["other"] = _numbers(_leading(places[::-1], opposite).near_columns())
    told["alone"] = _numbers(_leading(_places(inputs["nodes"])[::-1], opposite).near_columns())
    return told | {"again": _numbers(leading.near_columns())}


@contextmanager
def _counted_columns() -> Iterator[None]:
    """Let every new index array count what is read from it."""
    module = vars(scheduler.prefix_index)
    real = module["_columns"]
    module["_columns"] = lambda nodes: real(nodes).view(CountedColumns)
    try:
        yield
    finally:
        module["_columns"] = real


def _leading(places: list[_Places], inputs: dict[str, Any]) -> Leading:
    index = PrefixIndex()
    for node in range(inputs["num_nodes"]):
        index.add_node(node)
    return Leading(inputs["blocks"], 0, [*places], [*inputs["starts"]], index)


def _bits(nodes: int) -> list[int]:
    return [column for column in range(nodes.bit_length()) if nodes >> column & 1]


def _places(nodes: list[list[int]]) -> list[_Places]:
    return [
        _Places(1 << number, CountedBits(sum(1 << column for column in columns)))
        for number, columns in enumerate(nodes)
    ]


def _numbers(lengths: np.ndarray) -> list[Any]:
    """Return lengths as a list; whole numbers are integers there, whatever their type in the array."""
    return [int(length) if length == int(length) else length for length in np.ravel(lengths).tolist()]


def array_of(found: Any, what: str) -> Any:
    """Return an array. Raises TypeError for anything else."""
    if not isinstance(found, np.ndarray | np.generic):
        raise TypeError(f"{what} a {type(found).__name__}, and an array is wanted")
    return found


# ------------------------------------------------------------------------------------------- 7b


class SeenView:
    """What a policy reads of a view: columns, and predictions that count their rows.

    _predicted   rows that `prefill_s` and `fetch_s` have predicted. `fetch_s` is kept, and counts once.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.near, self.queue_s = np.array(given["near"], float), np.array(given["queue_s"], float)
        self.best = float(given["best"])
        self.pool = SimpleNamespace(blocks=given["best"], ssd_blocks=given["ssd_blocks"])
        self._predicted = 0
        self._table = np.array(given["prefill_s"])
        self._fetch_s = np.array(given["fetch_s"], float)
        self._is_fetch_known = False

    def prefill_s(self, reused: Any) -> np.ndarray:
        """Return the seconds of each instance after so many blocks of the prompt: a number or a column."""
        count, most = len(self.near), self._table.shape[1] - 1
        blocks = np.broadcast_to(np.asarray(reused, np.float64), (count,))
        for each in blocks:
            if not (0 <= each <= most and each == int(each)):
                raise ValueError(f"prefill_s({each:g}): the prompt has {most} blocks")
        self._predicted += count
        return self._table[np.arange(count), blocks.astype(np.int64)]  # type: ignore[no-any-return]

    @property
    def fetch_s(self) -> np.ndarray:
        """Return the seconds to fetch the rest of the longest prefix to each instance."""
        if not self._is_fetch_known:
            self._is_fetch_known = True
            self._predicted += len(self.near)
        return self._fetch_s

    def changed(self, given: dict[str, Any]) -> list[str]:
        """Return the names of the columns that are no longer as they were given."""
        columns = {"near": self.near, "queue_s": self.queue_s, "fetch_s": self._fetch_s}
        return [name for name, column in columns.items() if not np.array_equal(column, given[name])]


def rank(inputs: dict[str, Any]) -> dict[str, Any]:
    """Rank the instances of a view that is made by hand."""
    view = SeenView(inputs)
    ranked = KVCacheCentric(inputs["threshold"]).rank(view)  # type: ignore[arg-type]
    told: dict[str, Any] = {"predicted": view._predicted, "changed": view.changed(inputs)}
    count = len(inputs["near"])
    for name in ("score", "reused", "transfer_s", "prefill_s", "fetch"):
        column = array_of(getattr(ranked, name), f"{name} of rank() is")
        if column.shape not in ((count,), ()) or (name in ("score", "prefill_s") and not column.shape):
            raise ValueError(f"{name} of rank() has the shape {column.shape}; there are {count} instances")
        if not np.isfinite(column).all():
            raise ValueError(f"{name} of rank() has a number that is not finite: {column}")
        values = np.broadcast_to(column, (count,))
        told[name] = values.astype(bool).tolist() if name == "fetch" else values.astype(float).tolist()
    return told


# ------------------------------------------------------------------------------------------- 7c


def hot(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play prefills, each (node, keys, near, now). Tells the hot keys and the books after each one."""
    spots = HotSpots(
        inputs["threshold"],
        times=inputs["times"],
        window_s=inputs["window_s"],
        remembered=inputs["remembered"],
    )
    spots._reads = books = CountedLookUps()
    seen = []
    for node, keys, is_near, now in inputs["reads"]:
        before = books._asked + books._written
        found = spots.on_read(node, keys, is_near, now)
        accesses = books._asked + books._written - before
        if not isinstance(found, list):
            raise TypeError(f"on_read() returned a {type(found).__name__}, and a list is wanted")
        after = [[key, of, time_s, count] for (key, of), (time_s, count) in books.items()]
        seen.append({"hot": list(found), "books": after, "accesses": accesses})
    return seen


# ------------------------------------------------------------------------------------------- 7d


class SeenTimes(Sequence[float]):
    """Ascending times that count how many of them are read."""

    def __init__(self, times: Sequence[float], counts: list[int]) -> None:
        self._times, self._counts = list(times), counts

    def __len__(self) -> int:
        return len(self._times)

    def __getitem__(self, place: Any) -> Any:
        found = self._times[place]
        if isinstance(found, list):
            self._counts[0] += len(found)
            return SeenTimes(found, self._counts)
        self._counts[0] += 1
        return found

    def __add__(self, other: Sequence[float]) -> SeenTimes:
        return SeenTimes([*self, *other], self._counts)

    def __radd__(self, other: Sequence[float]) -> SeenTimes:
        return SeenTimes([*other, *self], self._counts)

    def copy(self) -> SeenTimes:
        """Return the same times; each of them is read."""
        return SeenTimes([*self], self._counts)


def load(inputs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Predict the load of decode from times that are given. Tells how many of these were read."""
    seen = []
    for given in inputs:
        counts = [0]
        book = DecodeLoad()
        book._expected = SeenTimes(given["expected"], counts)  # type: ignore[assignment]
        book._begun = SeenTimes(given["begun"], counts)  # type: ignore[assignment]
        if given["tokens"] is not None:
            book._tokens.add(given["tokens"])  # the mean of one measurement is that measurement
        if given["excess"] is not None:
            book._excess.add(given["excess"])
        found = book.sequences(given["at"], given["now"], given["tbt_s"])
        if not isinstance(found, int | np.integer):
            raise TypeError(f"sequences() returned a {type(found).__name__}, and a number is wanted")
        seen.append({"sequences": int(found), "reads": counts[0]})
    return seen


# ------------------------------------------------------------------------------------------- 7e


class SeenLoad:
    """A load that is given as stairs: (TBT, sequences from this TBT on). Notes what it is asked."""

    def __init__(self, running: int, stairs: list[tuple[float, int]]) -> None:
        self.running, self._stairs = running, stairs
        self._asked: list[list[float]] = []

    def sequences(self, at: float, now: float, tbt_s: float) -> int:
        """Return the sequences of the last stair that is not above this TBT; 0 below the first one."""
        self._asked.append([at, now, tbt_s])
        return next((count for from_s, count in reversed(self._stairs) if from_s <= tbt_s), 0)


class SeenHeld:
    """The held line: which requests are in it, and how many sequences they have."""

    def __init__(self, names: list[str], sequences: int) -> None:
        self._names, self.sequences = names, sequences

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._names


def _terms(terms: tuple[float, float], state: Any, request: Any) -> tuple[float, float]:
    """Give the terms of a test in place of those of the costs, for a state and a request."""
    return terms if state.decode_load is not None and request.request_id else (0.0, 0.0)


def tbt(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predict TBT for requests in states that are made by hand. Tells what the load was asked for."""
    module = vars(scheduler.admission.predictive)
    real = module["mean_tbt_terms"]
    seen = []
    try:
        for given in inputs:
            module["mean_tbt_terms"] = partial(_terms, tuple(given["terms"]))
            decode_load = SeenLoad(given["running"], given["stairs"])
            state = SimpleNamespace(
                decode_load=decode_load,
                held=SeenHeld(given["held"], given["held_sequences"]),
                decode_slots=given["slots"],
            )
            request = SimpleNamespace(
                request_id=given["request_id"], n=given["n"], slo_tbt_s=given["slo_tbt_s"], context=1
            )
            found = Predictive().tbt_s(state, request, None, given["ttft"], given["now"])  # type: ignore[arg-type]
            seen.append({"tbt_s": float(found), "asked": decode_load._asked})
    finally:
        module["mean_tbt_terms"] = real
    return seen


CALLS = {"near": near, "shared": shared, "rank": rank, "hot": hot, "load": load, "tbt": tbt}
