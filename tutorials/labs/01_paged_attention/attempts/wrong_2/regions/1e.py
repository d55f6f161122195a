    thread, row, head = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    kv_head = head // (query.shape[1] // key_cache.shape[1])
    b, new = 0, row
    while new >= query_lens[b]:
        new -= query_lens[b]
        b += 1
    position = context_lens[b] - query_lens[b] + new
    scores = cuda.shared.array(THREADS, np.float32)
    sums = cuda.local.array(MAX_CHANNELS, np.float32)
    for c in range(MAX_CHANNELS):
        sums[c] = ZERO
    highest, total = LOWEST, ZERO
    for start in range(max(0, position - window + 1), position + 1, THREADS):
        t = start + thread
        if t <= position:
            page = block_tables[b, t // page_size]
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, kv_head, t % page_size, d])
            scores[thread] = score * scale
            cuda.syncthreads()  # my score is written
        count = min(THREADS, position + 1 - start)
        top = highest
        for k in range(count):
            top = max(top, scores[k])
        factor = math.exp(highest - top)
        highest, total = top, total * factor
        for c in range(MAX_CHANNELS):
            sums[c] *= factor
        for k in range(count):
            page, slot = block_tables[b, (start + k) // page_size], (start + k) % page_size
            weight = math.exp(scores[k] - highest)
            total += weight
            for d in range(thread, head_dim, THREADS):
                sums[d // THREADS] += weight * widen(value_cache[page, kv_head, slot, d])
        cuda.syncthreads()
    for d in range(thread, head_dim, THREADS):
        out[row, head, d] = narrow(sums[d // THREADS] / total if total > ZERO else ZERO, out)
