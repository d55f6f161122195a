    # channels are the slowest index here: neighbours work on other rows, not on other channels
    rows, heads = out.shape[0], out.shape[1]
    me = cuda.grid(1)
    row = me % rows
    head = me // rows % heads
    channel = me // (rows * heads)
    if channel < out.shape[2]:
        end = 0
        sequence = 0
        rows_so_far = 0
        for b in range(len(query_lens)):
            if rows_so_far <= row < rows_so_far + query_lens[b]:
                sequence = b
                end = context_lens[b] - (rows_so_far + query_lens[b] - row) + 1
            rows_so_far += query_lens[b]
        kv_head = head * key_cache.shape[1] // heads
        page_size = key_cache.shape[2]
        highest = LOWEST
        total = ZERO
        mean = ZERO
        for t in range(end - 1, -1, -1):
            if t < end - window:
                break
            page = block_tables[sequence, t // page_size]
            score = ZERO
            for d in range(out.shape[2]):
                score += widen(key_cache[page, kv_head, t % page_size, d]) * widen(query[row, head, d])
            score *= scale
            if score > highest:
                total *= math.exp(highest - score)
                mean *= math.exp(highest - score)
                highest = score
            weight = math.exp(score - highest)
            total += weight
            mean += weight * widen(value_cache[page, kv_head, t % page_size, channel])
        out[row, head, channel] = narrow(mean / max(total, np.float32(1e-20)), out)
