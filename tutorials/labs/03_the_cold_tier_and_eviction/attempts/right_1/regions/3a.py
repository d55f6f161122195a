        if self.padded(nbytes) > self.free_bytes:
            return None
        extents: list[Extent] = []
        left = nbytes
        while (offset := self.allocate(left)) is None:
            hole = self._sizes[-1]
            extents.append((self._take(hole, hole, 1)[0], hole))
            left -= hole
        extents.append((offset, left))
        return tuple(extents)
