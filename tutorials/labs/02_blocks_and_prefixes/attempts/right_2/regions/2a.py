        if not new:
            return None
        self.take(new)
        if len(held) * self.page_tokens < num_tokens:
            held.extend(new)
            return None
        old = held.pop()
        held.extend(new)
        self.give_back([old])
        return old
