    index = cuda.grid(1)
    rows, heads, head_dim = query.shape
    if index >= rows * heads * head_dim:
        return
    channel = index % head_dim
    head = index // head_dim % heads
    row = index // head_dim // heads
    group = heads // key_cache.shape[1]
    page_size = key_cache.shape[2]

    b, token = 0, row
    while token >= query_lens[b]:
        token -= query_lens[b]
        b += 1
    position = context_lens[b] - query_lens[b] + token
    first = max(0, position - window + 1)

    # online softmax: one sweep is enough
    highest, total, mean = LOWEST, ZERO, ZERO
    for t in range(first, position):
        page = block_tables[b, t // page_size]
        score = ZERO
        for d in range(head_dim):
            score += widen(query[row, head, d]) * widen(key_cache[page, head // group, t % page_size, d])
        score *= scale
        top = max(highest, score)
        factor, weight = math.exp(highest - top), math.exp(score - top)
        total = total * factor + weight
        mean = mean * factor + weight * widen(value_cache[page, head // group, t % page_size, channel])
        highest = top
    if total > ZERO:
        mean /= total
    out[row, head, channel] = narrow(mean, out)
