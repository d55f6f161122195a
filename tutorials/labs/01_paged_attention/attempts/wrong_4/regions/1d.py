    n = cuda.grid(1)
    heads, head_dim = out.shape[1], out.shape[2]
    if n >= out.shape[0] * heads * head_dim:
        return
    d = n % head_dim
    head = (n // head_dim) % heads
    row = n // (head_dim * heads)
    kv_head = head % key_cache.shape[1]
    page_size = key_cache.shape[2]

    # which sequence does my row belong to?
    seq = 0
    first_row = 0
    while row >= first_row + query_lens[seq]:
        first_row += query_lens[seq]
        seq += 1
    pos = context_lens[seq] - query_lens[seq] + (row - first_row)
    oldest = max(pos - window + 1, 0)

    biggest = LOWEST
    for t in range(oldest, pos + 1):
        page = block_tables[seq, t // page_size]
        score = ZERO
        for j in range(head_dim):
            score += widen(query[row, head, j]) * widen(key_cache[page, kv_head, t % page_size, j])
        biggest = max(biggest, score * scale)
    denominator = ZERO
    numerator = ZERO
    for t in range(oldest, pos + 1):
        page = block_tables[seq, t // page_size]
        score = ZERO
        for j in range(head_dim):
            score += widen(query[row, head, j]) * widen(key_cache[page, kv_head, t % page_size, j])
        weight = math.exp(score * scale - biggest)
        denominator += weight
        numerator += weight * widen(value_cache[page, kv_head, t % page_size, d])
    out[row, head, d] = narrow(numerator / denominator if pos >= 0 else ZERO, out)
