        expected, begun = self._expected, self._begun
        begin = bisect_right(expected, at)
        if self.answer_tokens is None:
            return len(begun) + begin
        t_d = self.answer_tokens * tbt_s
        if now + t_d <= at:
            begin -= bisect_right(expected, at - t_d)
        going = len(begun) - bisect_right(begun, at - t_d)
        return begin + going
