        yielded = set()
        node = self._hand
        while len(yielded) < len(self):
            if node is not self._end and node.item not in yielded:
                if node.visited:
                    node.visited = False
                else:
                    self._hand = node
                    yield node.item
                    yielded.add(node.item)
                    self._hand = node.newer
            node = node.newer
