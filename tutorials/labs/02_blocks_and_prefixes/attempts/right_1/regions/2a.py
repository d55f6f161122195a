        begins_page = (num_tokens - 1) % self.page_tokens == 0
        if begins_page:
            self.take(new)
            held += new
            return None

        source = held[-1]
        users = self.used[source]
        if users > 1:
            self.take(new)
            self.used[source] = users - 1
            (held[-1],) = new
            return source
        return None
