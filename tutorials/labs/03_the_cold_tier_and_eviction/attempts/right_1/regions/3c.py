        waiting: dict[int, int] = {}
        ready: list[tuple[int, int]] = []

        def finish(item: int) -> None:
            parent = self._parent[item]
            if parent is None or parent not in self._used:
                return
            waiting[parent] = waiting.get(parent, self._children[parent]) - 1
            if not waiting[parent]:
                heappush(ready, (self._used[parent], parent))

        for leaf in self._leaves.ascending():
            yield leaf
            finish(leaf)
        while ready:
            _, inner = heappop(ready)
            yield inner
            finish(inner)
