    top = highest
    for score in scores:
        top = max(top, score)
    correction = np.exp(highest - top)
    for d in range(len(sums)):
        sums[d] *= correction
    for i in range(len(scores)):
        weight = np.exp(scores[i] - top)
        total += weight
        for d in range(len(sums)):
            sums[d] += weight * widen(values[i, d])
    return top, total
