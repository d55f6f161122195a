    row, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    kv_head = head // (query.shape[1] // key_cache.shape[1])
    b, i = 0, row
    while i >= query_lens[b]:
        i -= query_lens[b]
        b += 1
    end = context_lens[b] - query_lens[b] + i + 1
    scores = cuda.shared.array(THREADS, np.float32)
    sums = cuda.local.array(MAX_HEAD_DIM, np.float32)
    for c in range(head_dim):
        sums[c] = ZERO
    highest, total = LOWEST, ZERO
    for start in range(max(0, end - window), end, THREADS):
        count = min(THREADS, end - start)
        if thread < count:
            t = start + thread
            page, slot = block_tables[b, t // page_size], t % page_size
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, kv_head, slot, d])
            scores[thread] = score * scale
        cuda.syncthreads()
        top = highest
        for k in range(count):
            top = max(top, scores[k])
        shrink = math.exp(highest - top)
        highest, total = top, total * shrink
        for c in range(head_dim):
            sums[c] *= shrink
        for k in range(count):
            t = start + k
            weight = math.exp(scores[k] - top)
            total += weight
            for d in range(head_dim):
                value = widen(value_cache[block_tables[b, t // page_size], kv_head, t % page_size, d])
                sums[d] += weight * value
        cuda.syncthreads()
    for d in range(head_dim):
        out[row, head, d] = narrow(sums[d] / total if total > ZERO else ZERO, out)
