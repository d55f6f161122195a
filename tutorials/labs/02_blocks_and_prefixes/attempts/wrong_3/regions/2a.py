        if num_tokens % self.page_tokens == 0:
            # the page is full: the token goes into a new one
            self.take(new)
            held.extend(new)
            return None
        last = held[-1]
        if self.used[last] == 1:
            return None
        self.take(new)
        self.used[last] -= 1
        held[-1] = new[0]
        return last
