        if self.padded(nbytes) > self.free_bytes:
            return None
        offset = self.allocate(nbytes)
        if offset is not None:
            return ((offset, nbytes),)
        largest = self._sizes[-1]
        first = self.allocate(largest)
        return ((first, largest),) + self.allocate_extents(nbytes - largest)
