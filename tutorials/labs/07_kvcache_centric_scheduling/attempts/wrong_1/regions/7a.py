        lengths = np.zeros(len(self._index.nodes), np.int64)
        ends = [*self._starts[1:], self.blocks]
        for places, start, end in zip(self._places, self._starts, ends):
            if places.nodes:
                lengths[places.columns()] += end - start
        return lengths
