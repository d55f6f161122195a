        lengths = np.zeros(len(self._index.nodes), np.int64)
        self._starts.append(self.blocks)
        ends = self._starts[1:]
        common, columns = -1, None
        for places, end in zip(self._places, ends):
            rest = common & places.nodes
            if not rest:
                break
            if rest != common or columns is None:
                columns = places.columns() if rest == places.nodes else _columns(rest)
            common = rest
            lengths[columns] = end
        return lengths
