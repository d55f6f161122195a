        expected, begun = self._expected, self._begun
        begin = bisect_right(expected, at)
        if self.answer_tokens is None:
            return 0
        t_d = self.answer_tokens * tbt_s
        if now + t_d <= at:
            begin -= bisect_right(expected, at - t_d)
        going = len(begun) - bisect_right(begun, at - t_d)
        excess_s = self._excess.value * tbt_s if self._excess.is_measured else 0.0
        if at < now + excess_s:
            going += bisect_right(begun, now - t_d)
        return begin + going
