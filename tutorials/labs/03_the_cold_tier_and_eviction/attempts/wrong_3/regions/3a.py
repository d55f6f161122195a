        extents = []
        left = nbytes
        while left > 0:
            offset = self.allocate(left)
            if offset is not None:
                extents.append((offset, left))
                return tuple(extents)
            if not self._sizes:
                return None
            hole = self._sizes[-1]
            extents.append((self.allocate(hole), hole))
            left -= hole
