    groups = []
    for task in tasks:
        if task.problem:
            continue
        first, end = task.copied, len(task.out)
        if task in state.prefilling:
            full = task.sequence.num_computed // state.block_tokens
            end = min(end, full - len(task.job.load))
        while free_halves and first < end:
            entries = task.out[first : min(end, first + state.staging.half_blocks)]
            numbers = [number for number, _ in entries]
            places = [place for _, place in entries]
            pages = state.block_pages(task, numbers[0], len(numbers))
            half = free_halves.pop(0)
            groups.append(WriteGroup(half, pages, places, task.id, first, numbers=numbers))
            first += len(entries)
    return groups
