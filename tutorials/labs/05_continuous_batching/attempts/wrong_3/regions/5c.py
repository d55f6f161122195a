    sizes = [0] * len(wanted)
    while budget > 0 and sum(sizes) < sum(wanted):
        poorest = -1
        for prompt in range(len(wanted)):
            if sizes[prompt] < wanted[prompt] and (poorest < 0 or sizes[prompt] < sizes[poorest]):
                poorest = prompt
        sizes[poorest] += 1
        budget -= 1
    return sizes
