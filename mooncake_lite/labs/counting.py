"""A dictionary that counts how it is used: the cost of a region that is given it.

Imported by drivers of labs, in the child beside a student's code.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
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


class CountedLookUps(dict[Any, Any]):
    """A dictionary that counts how often it is asked for a key, and the entries that are walked over."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        """Count a look-up."""
        self.asked += 1
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked += 1
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.asked += 1
            yield key

    def keys(self) -> Any:
        """Return a view that asks this dictionary, as those of the next two methods do."""
        return KeysView(self)

    def values(self) -> Any:
        """Return a view."""
        return CountedValues(self)

    def items(self) -> Any:
        """Return a view."""
        return CountedItems(self)
