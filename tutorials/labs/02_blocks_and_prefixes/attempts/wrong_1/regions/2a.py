        if len(held) < self.needed(num_tokens):
            self.take(new)
            held.extend(new)
            return None
        last = held[-1]
        if self.used[last] > 1:
            self.take(new)
            held[-1] = new[0]
            return last
        return None
