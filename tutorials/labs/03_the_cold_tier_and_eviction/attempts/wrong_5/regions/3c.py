        left = dict(self._children)
        heap = []
        for leaf in self._leaves.ascending():
            while heap and heap[0][0] < self._used[leaf]:
                yield heap[0][1]
                self_item = heappop(heap)[1]
                parent = self._parent[self_item]
                if parent in self._used:
                    left[parent] -= 1
                    if not left[parent]:
                        heappush(heap, (self._used[parent], parent))
            yield leaf
            parent = self._parent[leaf]
            if parent in self._used:
                left[parent] -= 1
                if not left[parent]:
                    heappush(heap, (self._used[parent], parent))
        while heap:
            item = heappop(heap)[1]
            yield item
            parent = self._parent[item]
            if parent in self._used:
                left[parent] -= 1
                if not left[parent]:
                    heappush(heap, (self._used[parent], parent))
