        state: list[str] = [""] * self.num_pages
        for name, group in (("free", self.free), ("used", self.used), ("idle", self.idle)):
            for page in group:
                assert 0 <= page < self.num_pages, f"page {page} is {name}, but the cache has no such page"
                assert not state[page], f"page {page} is {state[page]} and {name}"
                state[page] = name
        assert all(state), "a page is neither free nor used nor idle"
        for page in self.cached:
            assert 0 <= page < self.num_pages, f"page {page} is cached, but there is no such page"
            assert state[page] != "free", f"page {page} is cached and free"
        for page in self.idle:
            assert page in self.cached, f"page {page} is idle and not cached"
        for page, users in self.used.items():
            assert users > 0, f"page {page} is used by {users} sequences"
