    index = cuda.grid(1)
    rows, heads, head_dim = out.shape
    if index >= rows * heads * head_dim:
        return
    row, rest = divmod(index, heads * head_dim)
    head, channel = divmod(rest, head_dim)
    kv_head = head // (heads // key_cache.shape[1])
    page_size = key_cache.shape[2]

    batch, i = 0, row
    while i >= query_lens[batch]:
        i -= query_lens[batch]
        batch += 1
    position = context_lens[batch] - query_lens[batch] + i
    oldest = max(0, position - window + 1)

    highest = LOWEST
    for t in range(oldest, position + 1):
        page, slot = block_tables[batch, t // page_size], t % page_size
        key = [widen(key_cache[page, kv_head, slot, d]) for d in range(head_dim)]
        score = sum(widen(query[row, head, d]) * key[d] for d in range(head_dim))
        highest = max(highest, score * scale)
    total, result = ZERO, ZERO
    for t in range(oldest, position + 1):
        page, slot = block_tables[batch, t // page_size], t % page_size
        key = [widen(key_cache[page, kv_head, slot, d]) for d in range(head_dim)]
        score = sum(widen(query[row, head, d]) * key[d] for d in range(head_dim))
        weight = math.exp(score * scale - highest)
        total += weight
        result += weight * widen(value_cache[page, kv_head, slot, channel])
    out[row, head, channel] = narrow(result / total if total > ZERO else ZERO, out)
