        waiting: dict[int, int] = {}
        ready: list[tuple[int, int]] = []

        def finish(item: int) -> None:
            parent = self._parent.get(item)
            if parent is None:
                return
            waiting[parent] = waiting.get(parent, self._children[parent]) - 1
            if not waiting[parent]:
                heappush(ready, (self._used.get(parent, 0), parent))

        for leaf in self._leaves.ascending():
            yield leaf
            finish(leaf)
        while ready:
            _, inner = heappop(ready)
            yield inner
            finish(inner)
