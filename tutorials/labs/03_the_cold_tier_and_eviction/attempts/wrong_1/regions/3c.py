        done = []
        for leaf in self._leaves.ascending():
            yield leaf
            done.append(leaf)
        left = dict(self._children)
        for item in done:
            parent = self._parent[item]
            if parent in left:
                left[parent] -= 1
                if left[parent] == 0 and parent in self._used:
                    yield parent
                    done.append(parent)
