        for leaf in sorted(self._leaves, key=self._used.get):
            yield leaf
        seen = set(self._leaves)
        rest = set(self._used) - seen
        while rest:
            parents = {self._parent[item] for item in rest}
            item = min(rest - parents, key=self._used.get)
            yield item
            rest.remove(item)
