    row, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    kv_head = head * key_cache.shape[1] // query.shape[1]
    b, past = 0, query_lens[0]
    while row >= past:
        b, past = b + 1, past + query_lens[b + 1]
    end = context_lens[b] - (past - row) + 1
    tops = cuda.shared.array(THREADS, np.float32)
    totals = cuda.shared.array(THREADS, np.float32)
    parts = cuda.shared.array((THREADS, THREADS), np.float32)
    sums = cuda.local.array(MAX_HEAD_DIM, np.float32)
    for d in range(head_dim):
        sums[d] = ZERO
    top, total, whole = LOWEST, ZERO, ZERO
    for t in range(max(0, end - window) + thread, end, THREADS):
        page, slot = block_tables[b, t // page_size], t % page_size
        score = ZERO
        for d in range(head_dim):
            score += scale * widen(query[row, head, d]) * widen(key_cache[page, kv_head, slot, d])
        higher = max(top, score)
        shrink, weight = math.exp(top - higher), math.exp(score - higher)
        top, total = higher, total * shrink + weight
        for d in range(head_dim):
            sums[d] = sums[d] * shrink + weight * widen(value_cache[page, kv_head, slot, d])
    tops[thread], totals[thread] = top, total  # my keys' softmax; all 64 are merged below
    cuda.syncthreads()
    for k in range(THREADS):
        top = max(top, tops[k])
    for k in range(THREADS):
        whole += totals[k] * math.exp(tops[k] - top)
    for begin in range(0, head_dim, THREADS):
        for c in range(min(THREADS, head_dim - begin)):
            parts[thread, c] = sums[begin + c] * math.exp(tops[thread] - top)
        cuda.syncthreads()
        if begin + thread < head_dim:
            mean = ZERO
            for k in range(THREADS):
                mean += parts[k, thread]
            out[row, head, begin + thread] = narrow(mean / whole if whole > ZERO else ZERO, out)
        cuda.syncthreads()
