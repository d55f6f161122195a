        if peer.heard_s is None:
            return "never heard" if now > peer.expected_s + self._first_s else ""

        def is_longer_than(seconds: float) -> bool:
            return now - peer.heard_s > seconds

        is_dead = is_longer_than(self._dead_s) and (
            peer.pid is None
            or is_longer_than(STUCK_FACTOR * self._dead_s)
            or process_is_stopped(peer.pid)
        )
        return "silent for too long" * is_dead
