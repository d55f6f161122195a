    tokens = np.arange(first, end)
    page_size = cache.shape[2]
    return cache[table[tokens // page_size], :, tokens % page_size]
