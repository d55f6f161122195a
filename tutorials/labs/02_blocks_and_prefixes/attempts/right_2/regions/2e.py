        extra = self._end.older if len(self) > self.capacity else self._end
        begin = node = self._hand
        second_lap = []  # those that lose their bit in the first lap, in the order of the hand
        while True:
            if node is not self._end and node is not extra:
                if node.visited:
                    node.visited = False
                    second_lap.append(node)
                else:
                    yield node.item
            node = self._hand = node.newer
            if node is begin:
                break
        for node in second_lap:
            self._hand = node
            yield node.item
            self._hand = node.newer
        if extra is not self._end:
            yield extra.item
