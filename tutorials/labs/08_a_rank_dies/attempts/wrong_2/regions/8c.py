        if record.stage is Stage.CANCELLED:
            self.move(record, Step.DROP)
            self.end(record, record.cancelled_as, now, may_still_write=may_still_write)
            return
        if not self._is_lost(record) and record.tries + 1 == MOST_TRIES:
            record.tries += 1
            self.fail(record, reason, now, may_still_write)
            return
        self.move(record, Step.LOSE)
        self.free(record, now, may_still_write)
        if not self._is_lost(record):
            record.tries += 1
            record.pause_s = PAUSE_S * record.tries
        if record.stage is Stage.HELD:
            self.wait_again(record, now)
        else:
            self._recall(record, reason, now)
