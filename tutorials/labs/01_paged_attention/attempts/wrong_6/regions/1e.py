    if cuda.threadIdx.x > 0:
        return
    row, head = cuda.blockIdx.x, cuda.blockIdx.y
    head_dim, page_size = query.shape[2], key_cache.shape[2]
    kv_head = head // (query.shape[1] // key_cache.shape[1])
    b, i = 0, row
    while i >= query_lens[b]:
        i -= query_lens[b]
        b += 1
    end = context_lens[b] - query_lens[b] + i + 1
    sums = cuda.local.array(MAX_HEAD_DIM, np.float32)
    for d in range(head_dim):
        sums[d] = ZERO
    highest, total = LOWEST, ZERO
    for t in range(max(0, end - window), end):
        page, slot = block_tables[b, t // page_size], t % page_size
        score = ZERO
        for d in range(head_dim):
            score += widen(query[row, head, d]) * widen(key_cache[page, kv_head, slot, d])
        top = max(highest, score * scale)
        shrink, weight = math.exp(highest - top), math.exp(score * scale - top)
        highest, total = top, total * shrink + weight
        for d in range(head_dim):
            sums[d] = sums[d] * shrink + weight * widen(value_cache[page, kv_head, slot, d])
    for d in range(head_dim):
        out[row, head, d] = narrow(sums[d] / total if total > ZERO else ZERO, out)
