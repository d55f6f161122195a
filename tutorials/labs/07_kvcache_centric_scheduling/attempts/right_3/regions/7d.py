        due = bisect_right(self._expected, now)
        soon = bisect_right(self._expected, at)
        if self.answer_tokens is None:
            return len(self._begun) + soon
        t_d = self.answer_tokens * tbt_s
        total = 0
        if now + t_d > at:
            total += due
        total += soon - max(due, bisect_right(self._expected, at - t_d))
        late = bisect_right(self._begun, now - t_d)
        total += len(self._begun) - max(late, bisect_right(self._begun, at - t_d))
        if self._excess.is_measured and now + self._excess.value * tbt_s > at:
            total += late
        return total
