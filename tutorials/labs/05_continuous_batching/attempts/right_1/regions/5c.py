    sizes = [0] * len(wanted)
    shortest_first = sorted(range(len(wanted)), key=lambda prompt: wanted[prompt])
    for done, prompt in enumerate(shortest_first):
        sizes[prompt] = min(wanted[prompt], budget // (len(wanted) - done))
        budget -= sizes[prompt]
    return sizes
