        if self.padded(nbytes) > self.free_bytes:
            return None
        extents: list[Extent] = []
        left = nbytes
        while self.padded(left) > self._sizes[-1]:
            hole = self._sizes[-1]
            extents.append((self._take(hole, hole, 1)[0], hole))
            left -= hole
        hole, size = self._sizes[-1], self.padded(left)
        extents.append((self._take(hole, size, 1)[0], left))
        return tuple(extents)
