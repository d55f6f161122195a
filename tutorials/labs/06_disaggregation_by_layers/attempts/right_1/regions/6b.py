    groups = []
    for task in tasks:
        if task.problem:
            continue
        end = len(task.out)
        if task in state.prefilling:
            end = min(end, task.sequence.num_computed // state.block_tokens - len(task.job.load))
        first = task.copied
        while first < end:
            if not free_halves:
                return groups
            entries = task.out[first : min(end, first + state.staging.half_blocks)]
            pages = []
            for number, _ in entries:
                pages += state.block_pages(task, number, 1)
            numbers, places = [number for number, _ in entries], [place for _, place in entries]
            groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, first, numbers=numbers))
            first += len(entries)
    return groups
