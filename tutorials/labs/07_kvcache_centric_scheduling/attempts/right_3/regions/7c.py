        ahead = []
        for one in near:
            if not one:
                break
            ahead.append(one)
        if not len(keys) > len(ahead) * self._threshold:
            return []
        hot, reads = [], self._reads
        for key, is_near in zip(keys, near):
            if is_near:
                continue
            self._count(key, node, now)
            if reads[key, node][1] >= self._times:
                reads.pop((key, node))
                hot += [key]
        excess = len(reads) - self._remembered
        if excess > 0:
            old = [pair for number, pair in enumerate(reads) if number < excess]
            for pair in old:
                reads.pop(pair)
        return hot
