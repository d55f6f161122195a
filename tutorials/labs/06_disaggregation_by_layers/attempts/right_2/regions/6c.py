    groups = []
    writes = list(writes)
    for chunk in chunks:
        if not (chunk.prompt and chunk.draws):
            continue
        task = state.tasks[chunk.job]
        first = task.copied + sum(len(write.places) for write in writes if write.job == task.id)
        out = task.out[first:]
        fits = state.limits.least <= len(out) <= state.staging.half_blocks * state.limits.layers // 2
        if not fits or not free_halves:
            continue
        half = free_halves.pop(0)
        pages = []
        for number, _ in out:
            pages.extend(state.block_pages(task, number, 1))
        groups.append(WriteGroup(half, pages, [place for _, place in out], task.id, first, behind=True))
    return groups
