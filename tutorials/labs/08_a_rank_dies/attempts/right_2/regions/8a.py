        began = peer.expected_s if peer.heard_s is None else peer.heard_s
        limit = self._dead_s
        if peer.heard_s is None:
            limit = self._first_s
        elif peer.pid is not None and limit < now - began <= STUCK_FACTOR * limit:
            if not process_is_stopped(peer.pid):
                limit = STUCK_FACTOR * limit
        return "silent" if now - began > limit else ""
