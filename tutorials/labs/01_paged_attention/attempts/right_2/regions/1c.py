    # one pass over the tokens, as in 1b; scores is not needed
    page_size = keys.shape[1]
    sums = np.zeros(len(query), np.float32)
    highest = LOWEST
    total = _ZERO
    for t in range(first, end):
        page = table[t // page_size]
        row = t % page_size
        score = _ZERO
        for d in range(len(query)):
            score += widen(query[d]) * widen(keys[page, row, d])
        score = np.float32(score * scale)
        if score > highest:
            factor = np.exp(highest - score)
            total *= factor
            sums *= factor
            highest = score
        weight = np.exp(score - highest)
        total += weight
        for d in range(len(query)):
            sums[d] += weight * widen(values[page, row, d])
    if total > _ZERO:
        sums /= total
    for d in range(len(query)):
        store(out, d, sums[d])
