    row, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    head_dim, page_size = out.shape[2], key_cache.shape[2]
    kv_head = head // (out.shape[1] // key_cache.shape[1])
    batch, i = 0, row
    while i >= query_lens[batch]:
        i -= query_lens[batch]
        batch += 1
    position = context_lens[batch] - query_lens[batch] + i
    oldest = max(0, position - window + 1)

    scores = cuda.shared.array(THREADS, np.float32)
    highest, total, result = LOWEST, ZERO, ZERO  # result: the sum of my channel
    for start in range(oldest, position + 1, THREADS):
        count = min(THREADS, position + 1 - start)
        if thread < count:
            t = start + thread
            page, slot = block_tables[batch, t // page_size], t % page_size
            score = ZERO
            for d in range(head_dim):
                score += widen(query[row, head, d]) * widen(key_cache[page, kv_head, slot, d])
            scores[thread] = score * scale
        cuda.syncthreads()
        if thread < head_dim:  # one channel for each thread
            before = highest
            for k in range(count):
                highest = max(highest, scores[k])
            factor = math.exp(before - highest)
            total, result = total * factor, result * factor
            for k in range(count):
                page, slot = block_tables[batch, (start + k) // page_size], (start + k) % page_size
                weight = math.exp(scores[k] - highest)
                total += weight
                result += weight * widen(value_cache[page, kv_head, slot, thread])
        cuda.syncthreads()
    if thread < head_dim:
        out[row, head, thread] = narrow(result / total if total > ZERO else ZERO, out)
