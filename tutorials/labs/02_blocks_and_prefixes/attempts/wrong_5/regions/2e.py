        newcomer = self._end.older if len(self) > self.capacity else None
        node = self._hand
        for _ in range(len(self) + 1):  # once around the ring, which has one node more
            if node is not self._end and node is not newcomer:
                if node.visited:
                    node.visited = False
                else:
                    self._hand = node
                    yield node.item
            node = node.newer
            self._hand = node
        if newcomer is not None:
            yield newcomer.item
