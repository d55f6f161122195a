        yield from self._leaves.ascending()
        left = dict(self._children)
        ready = list(self._leaves.ascending())
        heap = []
        while ready or heap:
            if ready:
                item = ready.pop()
            else:
                item = heappop(heap)[1]
                yield item
            above = self._parent[item]
            if above in left:
                left[above] -= 1
                if left[above] == 0 and above in self._used:
                    heappush(heap, (self._used[above], above))
