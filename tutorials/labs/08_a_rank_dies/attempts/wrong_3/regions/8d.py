        index, length = message.index, len(message.token_ids)
        if self.ended or message.attempt < self.least:
            return []
        if index < 0 or index + length > self.max_tokens:
            return []
        if index > self.next:
            known = self.waiting.get(index)
            if known is None or len(known.token_ids) <= length:
                self.waiting[index] = message
            return []
        passed = []
        for one in [message, *(self.waiting[key] for key in sorted(self.waiting))]:
            if one.index > self.next:
                break
            self.waiting.pop(one.index, None)
            old = self.next - one.index
            ends_here = old == len(one.token_ids) and one.finish is not None
            if old >= len(one.token_ids) and not ends_here:
                continue
            one = _without(one, old)
            self.token_ids += one.token_ids
            passed.append(one)
            if one.finish is not None:
                self.ended = True
        return passed
