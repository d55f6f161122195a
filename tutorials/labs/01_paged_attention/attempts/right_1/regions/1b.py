    new = highest
    for i in range(scores.shape[0]):
        new = max(new, scores[i])
    factor = np.exp(highest - new)
    total = total * factor
    for d in range(sums.shape[0]):
        sums[d] *= factor
    for i in range(scores.shape[0]):
        weight = np.exp(scores[i] - new)
        total += weight
        for d in range(sums.shape[0]):
            sums[d] += weight * widen(values[i, d])
    return new, total
