        has = np.zeros((len(self._places), len(self._index.nodes)), bool)
        for row, place in zip(has, self._places):
            row[place.columns()] = True
        sizes = np.diff([*self._starts, self.blocks])
        return sizes.astype(np.int64) @ np.logical_and.accumulate(has, axis=0).astype(np.int64)
