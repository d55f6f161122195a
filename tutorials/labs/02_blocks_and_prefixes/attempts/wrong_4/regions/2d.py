        assert len(self.free) + len(self.used) + len(self.idle) == self.num_pages
        for page in range(self.num_pages):
            is_free, is_used, is_idle = page in self.free, page in self.used, page in self.idle
            assert is_free + is_used + is_idle == 1, f"page {page} must be in exactly one state"
            if page in self.cached:
                assert not is_free, f"cached page {page} is free"
            if is_idle:
                assert page in self.cached, f"idle page {page} is not cached"
            if is_used:
                assert self.used[page] >= 1, f"page {page} has no users"
        for page in self.cached:
            assert 0 <= page < self.num_pages, f"cached page {page} does not exist"
