    begun = Counter()
    for group in writes:
        begun[group.job] += len(group.places)
    most = state.staging.half_blocks * state.limits.layers // 2
    groups = []
    for chunk in chunks:
        if not (chunk.prompt and chunk.draws):
            continue
        task = state.tasks[chunk.job]
        first = task.copied + begun[task.id]
        left = task.out[first:]
        if not (free_halves and left and state.limits.least <= len(left) <= most):
            continue
        pages = state.block_pages(task, first, len(left))
        places = [place for _, place in left]
        groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, first, behind=True))
    return groups
