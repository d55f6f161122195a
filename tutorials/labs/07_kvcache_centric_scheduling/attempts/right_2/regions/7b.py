        best, ssd, much = view.best, view.pool.ssd_blocks, self.threshold
        moves, slow, quick = view.fetch_s, view.prefill_s(view.near), view.prefill_s(best)
        rows = []
        for at, near in enumerate(view.near.tolist()):
            queue, move, whole, rest = float(view.queue_s[at]), moves[at], slow[at], quick[at]
            if (best > much * near or best - near <= ssd) and move + rest < whole:
                rows.append((queue + move + rest, best, move, rest, True))
            else:
                rows.append((queue + whole, near, 0.0, whole, near == best))
        score, reused, transfer, prefill, fetch = zip(*rows)
        return Ranked(
            np.array(score), np.array(reused), np.array(transfer), np.array(prefill), np.array(fetch)
        )
