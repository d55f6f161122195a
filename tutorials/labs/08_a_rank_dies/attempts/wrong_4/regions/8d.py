        index, end = message.index, message.index + len(message.token_ids)
        if self.ended or message.attempt < self.least or index < 0 or end > self.max_tokens:
            return []
        if index > self.next:
            known = self.waiting.get(index)
            if known is None or len(known.token_ids) <= len(message.token_ids):
                self.waiting[index] = message
            return []
        passed = []
        one = message
        while one is not None:
            old = self.next - one.index
            is_end = one.finish is not None and one.index + len(one.token_ids) == self.next
            if old < len(one.token_ids) or is_end:
                one = _without(one, old)
                self.token_ids += one.token_ids
                passed.append(one)
                if one.finish is not None:
                    self.end()
            one = self.waiting.pop(self.next, None)
        for old in [index for index in self.waiting if index <= self.next]:
            del self.waiting[old]
        return passed
