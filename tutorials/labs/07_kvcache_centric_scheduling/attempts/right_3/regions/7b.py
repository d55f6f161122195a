        best, near = view.best, view.near
        both = np.array([view.prefill_s(near), view.fetch_s + view.prefill_s(best)])
        may = ~((best <= self.threshold * near) & (best - near > view.pool.ssd_blocks))
        fetch = may & (both.argmin(axis=0) == 1)
        transfer_s = np.where(fetch, view.fetch_s, 0.0)
        total_s = np.where(fetch, both[1], both[0])
        reused = np.where(fetch, best, near)
        return Ranked(view.queue_s + total_s, reused, transfer_s, total_s - transfer_s, fetch | (near == best))
