        if record.may(Step.DROP):
            self.move(record, Step.DROP)
            return self.end(record, record.cancelled_as, now, may_still_write=may_still_write)
        if not self._is_lost(record):
            record.tries, record.pause_s = record.tries + 1, PAUSE_S * (record.tries + 1)
            if not record.tries < MOST_TRIES:
                return self.fail(record, reason, now, may_still_write)
        self.free(record, now, may_still_write)
        self.move(record, Step.LOSE)
        if record.stage is Stage.HELD:
            return self.wait_again(record, now)
        return self._recall(record, reason, now)
