    share = budget // len(wanted)
    sizes = [min(tokens, share) for tokens in wanted]
    rest = budget - sum(sizes)
    for prompt, tokens in enumerate(wanted):
        more = min(rest, tokens - sizes[prompt])
        sizes[prompt] += more
        rest -= more
    return sizes
