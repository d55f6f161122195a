        if self.answer_tokens is None:
            return len(self._begun) + sum(one <= at for one in self._expected)
        t_d = self.answer_tokens * tbt_s
        excess_s = self._excess.value * tbt_s if self._excess.is_measured else 0.0
        ends = [now + excess_s if one + t_d <= now else one + t_d for one in self._begun]
        ends += [max(one, now) + t_d for one in self._expected if one <= at]
        return sum(at < end for end in ends)
