        start, size = message.index, len(message.token_ids)
        if self.ended or message.attempt < self.least:
            return []
        if not 0 <= start <= start + size <= self.max_tokens:
            return []
        if start not in self.waiting or len(self.waiting[start].token_ids) <= size:
            self.waiting[start] = message
        passed = []
        while (index := min(self.waiting, default=self.max_tokens + 1)) <= self.next:
            first = self.waiting.pop(index)
            end = first.index + len(first.token_ids)
            fresh = first.token_ids[self.next - first.index :]
            if not fresh and (first.finish is None or end < self.next):
                continue
            passed.append(_without(first, self.next - first.index))
            self.token_ids.extend(fresh)
            if first.finish is not None:
                self.end()
        return passed
