        if self.needed(num_tokens) > len(held):
            self.take(new)
            held.extend(new)
            return None
        *rest, last = held
        if self.used[last] == 1:
            return None
        self.take(new)
        self.used[last] -= 1
        held = [*rest, *new]
        return last
