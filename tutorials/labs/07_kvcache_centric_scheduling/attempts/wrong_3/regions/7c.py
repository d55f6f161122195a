        leading = 0
        for is_near in near:
            if not is_near:
                break
            leading += 1
        if len(keys) <= self._threshold * leading:
            return []
        hot = []
        for key, is_near in zip(keys, near):
            if not is_near and self._count(key, node, now) >= self._times:
                del self._reads[key, node]
                hot.append(key)
        while len(self._reads) > self._remembered:
            self._reads.popitem()
        return hot
