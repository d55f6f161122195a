        prefix = next((at for at, one in enumerate(near) if not one), len(near))
        if not len(keys) > self._threshold * prefix:
            return []
        far = [key for key, is_near in zip(keys, near) if not is_near]
        counts = [self._count(key, node, now) for key in far]
        hot = [key for key, count in zip(far, counts) if count == self._times]
        for key in hot:
            self._reads.pop((key, node))
        for _ in range(len(self._reads) - self._remembered):
            del self._reads[next(iter(self._reads))]
        return hot
