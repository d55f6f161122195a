    new = highest
    for i in range(scores.shape[0]):
        new = max(new, scores[i])
    total *= np.exp(highest - new)
    for i in range(scores.shape[0]):
        total += np.exp(scores[i] - new)
    for d in range(sums.shape[0]):
        sums[d] *= np.exp(highest - new)
        for i in range(scores.shape[0]):
            sums[d] += np.exp(scores[i] - new) * widen(values[i, d])
    return new, total
