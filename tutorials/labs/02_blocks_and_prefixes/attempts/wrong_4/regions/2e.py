        newcomer = self._end.older if len(self) > self.capacity else None
        total = len(self) - (newcomer is not None)
        seen = set()
        node = self._end.newer
        while len(seen) < total:
            if node is not self._end and node is not newcomer and node not in seen:
                if node.visited:
                    node.visited = False
                else:
                    seen.add(node)
                    self._hand = node
                    yield node.item
            node = node.newer
        if newcomer is not None:
            yield newcomer.item
