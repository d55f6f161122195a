        if peer.heard_s is None:
            silent_s = now - peer.expected_s
            if silent_s >= self._first_s:
                return f"no first beat within {self._first_s:g} s"
            return ""
        silent_s = now - peer.heard_s
        if silent_s < self._dead_s:
            return ""
        if peer.pid is None or silent_s >= STUCK_FACTOR * self._dead_s:
            return f"silent for {silent_s:.1f} s"
        if process_is_stopped(peer.pid):
            return f"its process {peer.pid} is suspended, silent for {silent_s:.1f} s"
        return ""
