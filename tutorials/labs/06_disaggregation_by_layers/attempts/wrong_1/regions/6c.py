    groups = []
    most = state.staging.half_blocks * state.limits.layers // 2
    for chunk in chunks:
        if not (free_halves and chunk.prompt and chunk.draws):
            continue
        task = state.tasks[chunk.job]
        out = task.out[task.copied :]
        if state.limits.least <= len(out) <= most:
            pages = [page for number, _ in out for page in state.block_pages(task, number, 1)]
            places = [place for _, place in out]
            groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, task.copied, behind=True))
    return groups
