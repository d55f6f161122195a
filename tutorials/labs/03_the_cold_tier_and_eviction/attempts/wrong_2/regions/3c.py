        ready: list[tuple[int, int]] = []

        def finish(item: int) -> None:
            parent = self._parent[item]
            if parent is None or parent not in self._used:
                return
            self._children[parent] -= 1
            if not self._children[parent]:
                heappush(ready, (self._used[parent], parent))

        for leaf in self._leaves.ascending():
            yield leaf
            finish(leaf)
        while ready:
            _, inner = heappop(ready)
            yield inner
            finish(inner)
