    new_highest = scores[0]
    for i in range(1, scores.shape[0]):
        if scores[i] > new_highest:
            new_highest = scores[i]
    factor = np.exp(highest - new_highest) if total > _ZERO else _ZERO
    total = total * factor
    for d in range(sums.shape[0]):
        sums[d] *= factor
    for i in range(scores.shape[0]):
        weight = np.exp(scores[i] - new_highest)
        total += weight
        for d in range(sums.shape[0]):
            sums[d] += weight * widen(values[i, d])
    return new_highest, total
