    if sum(wanted) <= budget:
        return list(wanted)
    low, high = 0, max(wanted)  # low fits into the budget, high does not
    while high - low > 1:
        level = (low + high) // 2
        if sum(min(tokens, level) for tokens in wanted) <= budget:
            low = level
        else:
            high = level
    sizes = [min(tokens, low) for tokens in wanted]
    rest = budget - sum(sizes)
    for prompt, tokens in enumerate(wanted):
        if rest and tokens > low:
            sizes[prompt] += 1
            rest -= 1
    return sizes
