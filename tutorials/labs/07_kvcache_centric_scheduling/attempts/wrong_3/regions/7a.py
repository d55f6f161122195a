        lengths = np.zeros(len(self._index.nodes), np.int64)
        ends = [*self._starts[1:], self.blocks]
        for i, places in enumerate(self._places):
            if i:
                places.nodes &= self._places[i - 1].nodes
                places.node_columns = None
            if not places.nodes:
                break
            lengths[places.columns()] = ends[i]
        return lengths
