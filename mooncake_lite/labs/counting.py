"""An ordered dictionary and integers that count how they are used: the cost of a region that is given them.

Imported by drivers of labs, in the child beside a student's code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any


class CountedValues(ValuesView[Any]):
    """The values of a CountedLookUps: each that a loop visits counts once."""

    def __iter__(self) -> Iterator[Any]:
        return (dict.__getitem__(self._mapping, key) for key in self._mapping)  # type: ignore[attr-defined]


class CountedItems(ItemsView[Any, Any]):
    """The items likewise."""

    def __iter__(self) -> Iterator[Any]:
        mapping = self._mapping  # type: ignore[attr-defined]
        return ((key, dict.__getitem__(mapping, key)) for key in mapping)


class CountedLookUps(OrderedDict[Any, Any]):
    """A dictionary that counts how it is used. It may stand for a plain dictionary too.

    _asked     look-ups of a key, and entries that are walked over
    _walked    the latter alone
    _taken     of those asked for: by `pop` or `popitem`
    _written   keys that are set, deleted or moved
    """

    _asked = _walked = _taken = _written = 0

    def get(self, key: Any, default: Any = None) -> Any:
        """Count a look-up."""
        self._asked += 1
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self._asked += 1
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._asked += 1
        return super().__contains__(key)

    def _walk(self, keys: Iterator[Any]) -> Iterator[Any]:
        for key in keys:
            self._asked += 1
            self._walked += 1
            yield key

    def __iter__(self) -> Iterator[Any]:
        return self._walk(super().__iter__())

    def __reversed__(self) -> Any:
        return self._walk(super().__reversed__())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._written += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._written += 1
        super().__delitem__(key)

    def move_to_end(self, key: Any, last: bool = True) -> None:
        """Count a change."""
        self._written += 1
        super().move_to_end(key, last)

    def pop(self, key: Any, *default: Any) -> Any:
        """Count a look-up that takes an entry out."""
        return self._take(super().pop, key, *default)

    def popitem(self, last: bool = True) -> Any:
        """Count a look-up likewise."""
        return self._take(super().popitem, last)

    def _take(self, inherited: Callable[..., Any], *given: Any) -> Any:
        """Count one look-up, and nothing that the inherited method calls."""
        counts = self._asked + 1, self._walked, self._written
        try:
            return inherited(*given)
        finally:
            self._asked, self._walked, self._written = counts
            self._taken += 1

    def copy(self) -> Any:
        """Return all entries; each counts."""
        return OrderedDict(self.items())

    def keys(self) -> Any:
        """Return a view that asks this dictionary, as those of the next two methods do."""
        return KeysView(self)

    def values(self) -> Any:
        """Return a view."""
        return CountedValues(self)

    def items(self) -> Any:
        """Return a view."""
        return CountedItems(self)


class CountedNumber(int):
    """An integer that counts how often it is compared, also after arithmetic. Each subclass has a count."""

    count = 0


def counting(name: str) -> Callable[..., Any]:
    """Return the method of `int` of this name, which counts."""

    def method(self: CountedNumber, *other: Any) -> Any:
        type(self).count += 1
        return getattr(int, name)(self, *other)

    return method


def going_on(name: str) -> Callable[..., Any]:
    """Return the method of `int` of this name; its result goes on counting."""

    def method(self: CountedNumber, *other: Any) -> Any:
        made = getattr(int, name)(self, *other)
        return made if made is NotImplemented else type(self)(made)

    return method


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(CountedNumber, _name, counting(_name))
for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pos__"):
    setattr(CountedNumber, _name, going_on(_name))
