        # A node's length is where it drops out, so only those that drop out are written.
        num_nodes = len(self._index.nodes)
        lengths = np.full(num_nodes, self.blocks, dtype=np.int64)
        alive = (1 << num_nodes) - 1
        for place, start in zip(self._places, self._starts):
            dropped = alive & ~place.nodes
            if dropped:
                lengths[_columns(dropped)] = start
                alive ^= dropped
            if not alive:
                break
        return lengths
