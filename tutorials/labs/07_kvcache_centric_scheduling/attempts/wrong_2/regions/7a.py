        lengths = []
        ends = [*self._starts[1:], self.blocks]
        for column in range(len(self._index.nodes)):
            length = 0
            for places, end in zip(self._places, ends):
                if not places.nodes >> column & 1:
                    break
                length = end
            lengths.append(length)
        return np.array(lengths, np.int64)
