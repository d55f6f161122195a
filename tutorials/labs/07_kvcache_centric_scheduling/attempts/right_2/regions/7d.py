        started = bisect_right(self._expected, at)
        if self.answer_tokens is None:
            return started + self.running
        t_d = self.answer_tokens * tbt_s
        over = bisect_right(self._expected, at, 0, started, key=lambda begins: max(begins, now) + t_d)
        late = bisect_right(self._begun, now, key=lambda begins: begins + t_d)
        ended = bisect_right(self._begun, at, late, key=lambda begins: begins + t_d)
        excess = self._excess.value if self._excess.is_measured else 0
        lasting = late if at < now + excess * tbt_s else 0
        return (started - over) + lasting + (self.running - ended)
