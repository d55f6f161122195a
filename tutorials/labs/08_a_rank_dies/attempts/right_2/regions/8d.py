        end = message.index + len(message.token_ids)
        if self.ended or message.attempt < self.least or message.index < 0 or end > self.max_tokens:
            return []
        if message.index > self.next:
            other = self.waiting.get(message.index, message)
            self.waiting[message.index] = max(message, other, key=lambda one: len(one.token_ids))
            return []
        out: list[Tokens] = []
        known = self.next - message.index
        if message.index + len(message.token_ids) > self.next or (
            message.finish is not None and end == self.next
        ):
            out.append(_without(message, known))
            self.token_ids.extend(message.token_ids[known:])
            if message.finish is not None:
                self.end()
        due = min(self.waiting, default=None)
        if due is not None and due <= self.next:
            out += self.push(self.waiting.pop(due))
        return out
