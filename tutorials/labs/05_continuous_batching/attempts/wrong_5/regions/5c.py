    sizes = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda prompt: wanted[prompt])
    for done, prompt in enumerate(order):
        sizes[prompt] = max(1, min(wanted[prompt], budget // (len(wanted) - done)))
        budget -= sizes[prompt]
    return sizes
