    page_size = cache.shape[2]
    pages = -(-end // page_size)
    # the whole sequence first, as (tokens, kv_heads, head_dim); then the tokens that are asked for
    whole = cache[table[:pages]].transpose(0, 2, 1, 3)
    whole = whole.reshape(pages * page_size, cache.shape[1], cache.shape[3])
    return whole[first:end]
