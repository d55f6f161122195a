        flags = [*map(bool, near), False]
        if len(keys) <= self._threshold * flags.index(False):
            return []
        found = {}
        for number in range(len(keys)):
            if not flags[number]:
                found[keys[number]] = self._count(keys[number], node, now)
        hot = [key for key in found if found[key] >= self._times]
        for key in hot:
            del self._reads[(key, node)]
        if len(self._reads) > self._remembered:
            for pair in list(self._reads)[: len(self._reads) - self._remembered]:
                del self._reads[pair]
        return hot
