    sizes = [0] * len(wanted)
    hungry = list(range(len(wanted)))
    while budget and hungry:
        share = max(1, budget // len(hungry))
        for prompt in hungry[:budget]:
            more = min(share, wanted[prompt])
            sizes[prompt] += more
            wanted[prompt] -= more
            budget -= more
        hungry = [prompt for prompt in hungry if wanted[prompt]]
    return sizes
