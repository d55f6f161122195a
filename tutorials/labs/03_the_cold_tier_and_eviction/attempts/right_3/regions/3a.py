        if self.free_bytes < padded_size(nbytes, self.alignment):
            return None
        result = ()
        while nbytes > 0:
            part = min(nbytes, self._sizes[-1])
            result += ((self.allocate(part), part),)
            nbytes -= part
        return result
