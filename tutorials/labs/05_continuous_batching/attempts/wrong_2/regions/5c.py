    sizes = []
    for done, tokens in enumerate(wanted):
        sizes.append(min(tokens, budget // (len(wanted) - done)))
        budget -= sizes[-1]
    return sizes
