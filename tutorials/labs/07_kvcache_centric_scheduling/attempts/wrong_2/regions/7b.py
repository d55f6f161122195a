        best, near = view.best, view.near
        here_s, there_s = view.prefill_s(near), view.prefill_s(best)
        moves_s = view.fetch_s
        worth = (best > 1.5 * near) | (best - near <= view.pool.ssd_blocks)
        takes = worth & (moves_s + there_s < here_s)
        reused = np.where(takes, best, near)
        transfer_s = np.where(takes, moves_s, 0.0)
        prefill_s = np.where(takes, there_s, here_s)
        return Ranked(view.queue_s + transfer_s + prefill_s, reused, transfer_s, prefill_s, reused == best)
