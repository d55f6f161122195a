        gone = set()
        for leaf in self._leaves.ascending():
            yield leaf
            gone.add(leaf)
        while len(gone) < len(self._used):
            rest = [item for item in self._used if item not in gone]
            parents = {self._parent[item] for item in rest}
            coldest = min((i for i in rest if i not in parents), key=lambda i: self._used[i])
            yield coldest
            gone.add(coldest)
