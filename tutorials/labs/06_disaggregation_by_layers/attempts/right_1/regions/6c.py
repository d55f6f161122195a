    begun = {}
    for write in writes:
        begun[write.job] = begun.get(write.job, 0) + len(write.places)
    groups = []
    for chunk in chunks:
        if not chunk.prompt or not chunk.draws:
            continue
        if not free_halves:
            break
        task = state.tasks[chunk.job]
        first = task.copied + begun.get(chunk.job, 0)
        count = len(task.out) - first
        if count < state.limits.least or 2 * count > state.staging.half_blocks * state.limits.layers:
            continue
        pages, places = [], []
        for number, place in task.out[first:]:
            pages += state.block_pages(task, number, 1)
            places.append(place)
        groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, first, behind=True))
    return groups
