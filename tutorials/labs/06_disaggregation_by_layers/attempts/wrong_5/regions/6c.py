    groups = []
    begun = Counter()
    for write in writes:
        begun[write.job] += len(write.places)
    most = state.staging.half_blocks * state.limits.layers // 2
    for chunk in chunks:
        if not (free_halves and chunk.draws):
            continue
        task = state.tasks[chunk.job]
        begin = task.copied + begun[task.id]
        out = task.out[begin:]
        if 1 <= len(out) <= most:
            pages = [page for number, _ in out for page in state.block_pages(task, number, 1)]
            places = [place for _, place in out]
            groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, begin))
    return groups
