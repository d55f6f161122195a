        since = peer.heard_s if peer.heard_s is not None else peer.expected_s
        is_stopped = peer.pid is None or process_is_stopped(peer.pid)
        if peer.heard_s is None:
            limit = self._first_s
        elif is_stopped:
            limit = self._dead_s
        else:
            limit = STUCK_FACTOR * self._dead_s
        return f"silent for more than {limit} s" if now - since > limit else ""
