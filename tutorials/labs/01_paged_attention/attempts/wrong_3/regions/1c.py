    head_dim, page_size = query.shape[0], keys.shape[1]
    sums = np.zeros(head_dim, np.float32)
    highest = LOWEST
    # page by page, so that the table is looked up once for each page
    for logical in range(first // page_size, (end + page_size - 1) // page_size):
        page = table[logical]
        for slot in range(page_size):
            t = logical * page_size + slot
            if t >= first:
                score = _ZERO
                for d in range(head_dim):
                    score += widen(query[d]) * widen(keys[page, slot, d])
                scores[t - first] = score * scale
                highest = max(highest, scores[t - first])
    total = _ZERO
    for logical in range(first // page_size, (end + page_size - 1) // page_size):
        page = table[logical]
        for slot in range(page_size):
            t = logical * page_size + slot
            if t >= first:
                weight = np.exp(scores[t - first] - highest)
                total += weight
                for d in range(head_dim):
                    sums[d] += weight * widen(values[page, slot, d])
    for d in range(head_dim):
        store(out, d, sums[d] / total if total > _ZERO else _ZERO)
