        if self._tokens.is_measured:
            decode_s = self._tokens.value * tbt_s
            extra_s = self._excess.value * tbt_s if self._excess.is_measured else 0.0
        else:
            return len(self._begun) + bisect_right(self._expected, at)
        late = bisect_right(self._begun, now - decode_s)
        ended = bisect_right(self._begun, at - decode_s, late)
        count = len(self._begun) - ended
        if now + extra_s > at:
            count += late
        count += bisect_right(self._expected, at)
        if at - now >= decode_s:
            count -= bisect_right(self._expected, at - decode_s)
        return count
