    sizes = [0 for _ in wanted]
    hungry = list(range(len(wanted)))
    while budget and hungry:
        share = max(1, budget // len(hungry))
        still = []
        for prompt in hungry[:budget]:
            more = min(share, wanted[prompt] - sizes[prompt])
            sizes[prompt] += more
            budget -= more
            if sizes[prompt] < wanted[prompt]:
                still.append(prompt)
        hungry = still
    return sizes
