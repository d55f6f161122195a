        newest = self._end.older if len(self) > self.capacity else None
        done = set()
        todo = len(self) - (1 if newest else 0)
        while len(done) < todo:
            node = self._hand
            self._hand = node.newer  # the hand moves on
            if node is self._end or node is newest or node.item in done:
                continue
            if node.visited:
                node.visited = False
                continue
            done.add(node.item)
            yield node.item
        if newest:
            yield newest.item
