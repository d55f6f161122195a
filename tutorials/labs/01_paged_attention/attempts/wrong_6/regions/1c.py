    page_size = keys.shape[1]
    head_dim = query.shape[0]
    highest = LOWEST
    for t in range(first, end):
        page, slot = table[t // page_size], t % page_size
        score = _ZERO
        for d in range(head_dim):
            score += widen(query[d]) * widen(keys[page, slot, d])
        scores[t - first] = score * scale
        highest = max(highest, scores[t - first])
    total = _ZERO
    for t in range(end, -(-end // page_size) * page_size):
        scores[t - first] = LOWEST
    for i in range(end - first):
        scores[i] = np.exp(scores[i] - highest)
        total += scores[i]
    for d in range(head_dim):
        mean = _ZERO
        for t in range(first, end):
            mean += scores[t - first] * widen(values[table[t // page_size], t % page_size, d])
        store(out, d, mean / total if total > _ZERO else _ZERO)
