        if peer.pid is not None and peer.heard_s is None:
            silence = now - peer.expected_s
            if silence > self._dead_s and process_is_stopped(peer.pid):
                return "its process is suspended"
            return "no beat has come" if silence > self._first_s else ""
        if peer.heard_s is None:
            return "no beat has come" if now - peer.expected_s > self._first_s else ""
        silence = now - peer.heard_s
        if silence > STUCK_FACTOR * self._dead_s:
            return "silent"
        if silence > self._dead_s and (peer.pid is None or process_is_stopped(peer.pid)):
            return "silent"
        return ""
