    _, kv_heads, page_size, head_dim = cache.shape
    rows = np.empty((end - first, kv_heads, head_dim), cache.dtype)
    t = first
    while t < end:
        # one run of tokens that lie in the same page
        stop = min(end, (t // page_size + 1) * page_size)
        slot = t % page_size
        page = cache[table[t // page_size], :, slot : slot + stop - t]
        rows[t - first : stop - first] = page.swapaxes(0, 1)
        t = stop
    return rows
