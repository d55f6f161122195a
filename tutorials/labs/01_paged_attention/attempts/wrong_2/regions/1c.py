    page_size = keys.shape[1]
    total = _ZERO
    for t in range(first, end):
        page, slot = table[t // page_size], t % page_size
        dot = _ZERO
        for d in range(len(query)):
            dot += widen(query[d]) * widen(keys[page, slot, d])
        scores[t - first] = np.exp(dot * scale)
        total += scores[t - first]
    for d in range(len(query)):
        mean = _ZERO
        for t in range(first, end):
            mean += scores[t - first] * widen(values[table[t // page_size], t % page_size, d])
        store(out, d, mean / total if total > _ZERO else _ZERO)
