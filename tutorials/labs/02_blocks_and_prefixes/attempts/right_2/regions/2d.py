        free, cached = frozenset(self.free), self.cached.keys()
        used, idle = self.used.keys(), self.idle.keys()
        if free | used | idle != frozenset(range(self.num_pages)):
            raise AssertionError("free, used and idle together are not all pages")
        if len(self.free) + len(used) + len(idle) != self.num_pages:
            raise AssertionError("a page is in two of free, used and idle, or twice in free")
        if not idle <= cached <= used | idle:
            raise AssertionError("a cached page is free, or an idle page is not cached")
        if min(self.used.values(), default=1) < 1:
            raise AssertionError("a used page has no user")
