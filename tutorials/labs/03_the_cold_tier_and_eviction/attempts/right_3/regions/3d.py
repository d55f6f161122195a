        held = set()
        extra = 0
        inserted_first = len(self) > self.capacity
        if inserted_first:
            held.add(self._newcomer)
            extra = 1 if self._newcomer in self._small else 0

        def pending(queue):
            return any(item not in held for item in queue)

        while len(held) < len(self):
            full = len(self._small) >= self._small_places + extra
            if full and pending(self._small) or not pending(self._main):
                queue = self._small
            else:
                queue = self._main
            item = next(iter(queue))
            if item in held:
                queue[item] = queue.pop(item)
            elif queue is self._small and queue[item] > 1:
                del queue[item]
                self._main[item] = 0
            elif queue is self._main and queue[item] > 0:
                queue[item] = queue.pop(item) - 1
            else:
                yield item
                held.add(item)
                queue.move_to_end(item)
        if inserted_first:
            yield self._newcomer
