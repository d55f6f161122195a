    row, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, size = query.shape[2], key_cache.shape[2]
    kv_head = head // (query.shape[1] // key_cache.shape[1])
    b, token = 0, row
    while token >= query_lens[b]:
        token, b = token - query_lens[b], b + 1
    end = context_lens[b] - query_lens[b] + token + 1
    scores = cuda.shared.array(THREADS, np.float32)
    total = cuda.shared.array(1, np.float32)  # one for the whole block
    sums = cuda.local.array(MAX_CHANNELS, np.float32)
    for c in range(MAX_CHANNELS):
        sums[c] = ZERO
    if thread == 0:
        total[0] = ZERO
    highest = LOWEST
    for start in range(max(0, end - window), end, THREADS):
        t = start + thread
        if t < end:
            scores[thread] = ZERO
            for d in range(head_dim):
                key = widen(key_cache[block_tables[b, t // size], kv_head, t % size, d])
                scores[thread] += widen(query[row, head, d]) * scale * key
        cuda.syncthreads()
        count, top = min(THREADS, end - start), highest
        for k in range(count):
            top = max(top, scores[k])
        factor, highest = math.exp(highest - top), top
        if thread == 0:
            total[0] *= factor
        cuda.syncthreads()
        if t < end:
            total[0] += math.exp(scores[thread] - top)  # each key counts once
        for d in range(thread, head_dim, THREADS):
            sums[d // THREADS] *= factor
            for k in range(count):
                page, slot = block_tables[b, (start + k) // size], (start + k) % size
                sums[d // THREADS] += math.exp(scores[k] - top) * widen(value_cache[page, kv_head, slot, d])
        cuda.syncthreads()
    for d in range(thread, head_dim, THREADS):
        out[row, head, d] = narrow(sums[d // THREADS] / total[0] if end > 0 else ZERO, out)
