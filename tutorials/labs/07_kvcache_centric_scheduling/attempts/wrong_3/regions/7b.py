        best, near = view.best, view.near
        here_s, there_s = view.prefill_s(near), view.prefill_s(best)
        worth = (best > self.threshold * near) | (best - near <= view.pool.ssd_blocks)
        takes = worth & (view.fetch_s + there_s < here_s)
        reused, transfer_s, prefill_s = near, np.where(takes, view.fetch_s, 0.0), np.where(takes, there_s, here_s)
        reused[takes] = best
        return Ranked(view.queue_s + transfer_s + prefill_s, reused, transfer_s, prefill_s, reused == best)
