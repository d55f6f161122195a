    new_highest = max(highest, np.max(scores))
    weights = np.exp(scores - new_highest)
    factor = np.exp(highest - new_highest)
    for d in range(len(sums)):
        gained = _ZERO
        for i in range(len(weights)):
            gained += weights[i] * widen(values[i, d])
        sums[d] = sums[d] * factor + gained
    return new_highest, total * factor + np.sum(weights)
