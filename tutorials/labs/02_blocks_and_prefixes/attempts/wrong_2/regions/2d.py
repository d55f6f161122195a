        free = set(self.free)
        assert free.isdisjoint(self.used), "a page is free and used"
        assert free.isdisjoint(self.idle), "a page is free and idle"
        assert self.used.keys().isdisjoint(self.idle), "a page is used and idle"
        assert len(self.free) + len(self.used) + len(self.idle) == self.num_pages, "pages are missing"
        assert free.isdisjoint(self.cached), "a cached page is free"
        assert self.idle.keys() <= self.cached.keys(), "an idle page is not cached"
