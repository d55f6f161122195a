        if self.padded(nbytes) > self.free_bytes:
            return None
        extents = []
        left = nbytes
        while left > max(self._starts.values()):
            hole = max(self._starts.values())
            extents.append((self._take(hole, hole, 1)[0], hole))
            left -= hole
        extents.append((self.allocate(left), left))
        return tuple(extents)
