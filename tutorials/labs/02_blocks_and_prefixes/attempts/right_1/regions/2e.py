        # The judged nodes can only be those behind us in this call, so a set of them is enough.
        newest = None
        if len(self) > self.capacity:
            newest = self._end.older
        waiting = len(self) - (newest is not None)
        judged = set()
        while waiting:
            node = self._hand
            if node is not self._end and node is not newest and node not in judged:
                if not node.visited:
                    judged.add(node)
                    waiting -= 1
                    yield node.item
                node.visited = False
            self._hand = node.newer
        if newest is not None:
            yield newest.item
