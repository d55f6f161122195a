        lengths = np.zeros(len(self._index.nodes), np.int64)
        ends = [*self._starts[1:], self.blocks]
        common, columns = -1, None
        for places, end in zip(self._places, ends):
            rest = common & places.nodes
            if not rest:
                break
            columns = places.columns()
            common = rest
            lengths[columns] = end
        return lengths
