        left = set(range(len(self._index.nodes)))
        lengths = np.zeros(len(left), np.int64)
        for place, end in zip(self._places, self._starts[1:] + [self.blocks]):
            left &= set(place.columns().tolist())
            lengths[sorted(left)] = end
        return lengths
