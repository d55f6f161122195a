        is_cancelled = record.stage is Stage.CANCELLED
        failed = not is_cancelled and not self._is_lost(record)
        record.tries += failed
        if is_cancelled:
            self.move(record, Step.DROP)
            self.end(record, record.cancelled_as, now, may_still_write=may_still_write)
        elif failed and record.tries == MOST_TRIES:
            self.fail(record, reason, now, may_still_write)
        else:
            if failed:
                record.pause_s = sum(PAUSE_S for _ in range(record.tries))
            self.free(record, now, may_still_write)
            self.move(record, Step.LOSE)
            if record.stage is not Stage.HELD:
                self._recall(record, reason, now)
            else:
                self.wait_again(record, now)
