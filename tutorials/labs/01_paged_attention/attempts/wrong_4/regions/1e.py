    row, head, me = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, page_size = out.shape[2], key_cache.shape[2]
    kv = head // (out.shape[1] // key_cache.shape[1])
    seq, first_row = 0, 0
    while row >= first_row + query_lens[seq]:
        first_row += query_lens[seq]
        seq += 1
    end = context_lens[seq] - query_lens[seq] + (row - first_row) + 1
    scores = cuda.shared.array(THREADS, np.float32)
    sums = cuda.local.array(MAX_CHANNELS, np.float32)
    for c in range(MAX_CHANNELS):
        sums[c] = ZERO
    highest, total = LOWEST, ZERO
    for start in range(max(0, end - window), end, THREADS):
        count = min(THREADS, end - start)
        if me < count:
            page, slot = block_tables[seq, (start + me) // page_size], (start + me) % page_size
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, kv, slot, d])
            scores[me] = score * scale
        cuda.syncthreads()
        old = highest
        for k in range(count):
            highest = max(highest, scores[k])
        if me < count:  # every thread turns its own score into a weight
            scores[me] = math.exp(scores[me] - highest)
        cuda.syncthreads()
        shrink = math.exp(old - highest)
        total *= shrink
        for c in range(MAX_CHANNELS):
            sums[c] *= shrink
        for k in range(count):
            total += scores[k]
            page, slot = block_tables[seq, (start + k) // page_size], (start + k) % page_size
            for d in range(me, head_dim, THREADS):
                sums[d // THREADS] += scores[k] * widen(value_cache[page, kv, slot, d])
        cuda.syncthreads()
    for d in range(me, head_dim, THREADS):
        out[row, head, d] = narrow(sums[d // THREADS] / total if total > ZERO else ZERO, out)
