    tokens = np.arange(first, end)
    page_size = cache.shape[2]
    pages = cache[table[tokens // page_size]]
    return pages[np.arange(end - first), :, tokens % page_size]
