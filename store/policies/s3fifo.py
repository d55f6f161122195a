"""S3-FIFO: three queues. An item that is not used again soon never reaches the large one.

New items enter the small queue, a tenth of the space. At its end, items used more than once move to the main
queue. The others are evicted, and only their names stay, in the ghost queue. An item whose name is there
enters the main queue at once. At the end of the main queue, a used item goes around again, with one use less.

           new -> | small, 10 % | --used twice--> | main, 90 % | -+--> victim
                        |                             ^    ^------+ used: around again
                        v victim                      |
                  | ghost: names | ---comes back------+

J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP
2023, algorithm 1. There one insertion may evict from both queues. Here each eviction takes one block, from
the queue that is too long by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from store.policies.contract import BlockFacts, Policy

MOST_USES = 3
"""Uses are counted up to this: two bits."""


class S3FIFO(Policy):
    """Queues are ordered dictionaries, the oldest item in front.

    _small, _main   item -> uses since it came into this queue, 0 to MOST_USES
    _ghost          names of items evicted from the small queue, at most as many as the main queue has places
    _newcomer       the item that came in last
    """

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._newcomer = 0
        self._small_places = max(1, capacity // 10)
        self._ghost_places = capacity - self._small_places

    def on_insert(self, item: int, facts: BlockFacts, now: float) -> None:
        """Insert into the small queue, or into the main one if the name is among the ghosts."""
        queue = self._small
        if item in self._ghost:
            del self._ghost[item]
            queue = self._main
        queue[item] = 0
        self._newcomer = item

    def on_access(self, item: int, now: float) -> None:
        """Count the use; nothing moves."""
        queue = self._small if item in self._small else self._main
        queue[item] = min(queue[item] + 1, MOST_USES)

    def on_remove(self, item: int, *, evicted: bool) -> None:
        """Take an item out of its queue; remember the name if it was evicted from the small queue.

        The newcomer, for which it was evicted, moves behind all items that were moved meanwhile.
        """
        if len(self) > self.capacity:
            queue = self._small if self._newcomer in self._small else self._main
            queue.move_to_end(self._newcomer)
        if item in self._main:
            del self._main[item]
            return
        del self._small[item]
        if evicted and self._ghost_places:
            self._ghost[item] = None
            if len(self._ghost) > self._ghost_places:
                self._ghost.popitem(last=False)

    def victims(self, now: float) -> Iterator[int]:
        """Yield all known items, each once. Items that move meanwhile stay where they are then.

        The item in front of one queue is judged: that of the small queue while its length is at least the
        limit, _small_places, else that of the main one. Where all items of one queue are done, those of the
        other are judged.

            small, used more than once   goes to the back of the main queue and has no uses there
            main, used                   goes to its back and has one use less
            any other                    is yielded. If the caller asks for the next one, this one may not be
                                         evicted: it is done, and goes to the back of its queue with its uses

        An item that is done is not judged again: whatever its uses, it keeps them, stays in its queue, and
        goes to the back whenever it is in front. It still counts in the length of its queue.
        The paper evicts before it inserts. If the caller has inserted first, there are more items than the
        capacity. Then the newcomer is done from the beginning, and is yielded after all others. If it is in
        the small queue, the limit is _small_places + 1.
        """
        # labs:begin 3d
        small, main = self._small, self._main
        refused = {self._newcomer} if len(self) > self.capacity else set()
        limit = self._small_places + len(refused & small.keys())
        small_left, main_left = (len(queue) - len(refused & queue.keys()) for queue in (small, main))
        while small_left or main_left:
            if small_left and (len(small) >= limit or not main_left):
                item, uses = next(iter(small.items()))
                if item not in refused and uses > 1:
                    del small[item]
                    main[item] = 0
                    small_left, main_left = small_left - 1, main_left + 1
                    continue
                if item not in refused:
                    yield item
                    refused.add(item)
                    small_left -= 1
                small.move_to_end(item)
            else:
                item, uses = next(iter(main.items()))
                if item not in refused and uses > 0:
                    main[item] = uses - 1
                elif item not in refused:
                    yield item
                    refused.add(item)
                    main_left -= 1
                main.move_to_end(item)
        if len(self) > self.capacity:
            yield self._newcomer
        # labs:end 3d

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def check(self) -> None:
        """Assert that no name is in two queues, and that the ghosts are within their bound."""
        assert not self._small.keys() & self._main.keys()
        assert not self._ghost.keys() & (self._small.keys() | self._main.keys())
        assert len(self._ghost) <= self._ghost_places
        assert all(0 <= uses <= MOST_USES for uses in (*self._small.values(), *self._main.values()))
