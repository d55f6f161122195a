    sizes, need = [0] * len(wanted), [int(tokens) for tokens in wanted]
    left = list(range(len(need)))
    while budget and left:
        for prompt in list(left):
            if budget == 0:
                break
            sizes[prompt], budget = sizes[prompt] + 1, budget - 1
            if sizes[prompt] == need[prompt]:
                left.remove(prompt)
    return sizes
