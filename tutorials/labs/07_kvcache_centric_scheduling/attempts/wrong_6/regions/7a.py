        runs = [int(places.nodes) for places in self._places]
        lengths = []
        ends = [*self._starts[1:], self.blocks]
        for column in range(len(self._index.nodes)):
            length = 0
            for nodes, end in zip(runs, ends):
                if not nodes >> column & 1:
                    break
                length = end
            lengths.append(length)
        return np.array(lengths, np.int64)
