        near, queue = view.near, view.queue_s
        reused = near.copy()
        transfer = np.zeros_like(queue)
        prefill = np.array(view.prefill_s(near), dtype=float)
        if view.best > 0:
            fetch_s, with_best = view.fetch_s, view.prefill_s(view.best)
            missing = view.best - near
            allowed = np.logical_or(view.best > near * self.threshold, missing <= view.pool.ssd_blocks)
            way = np.logical_and(allowed, fetch_s + with_best < prefill)
            reused[way] = view.best
            transfer[way] = fetch_s[way]
            prefill[way] = with_best[way]
        return Ranked(
            score=queue + transfer + prefill,
            reused=reused,
            transfer_s=transfer,
            prefill_s=prefill,
            fetch=np.equal(reused, view.best),
        )
