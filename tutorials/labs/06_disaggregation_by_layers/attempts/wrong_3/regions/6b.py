    groups = []
    for task in tasks:
        end = len(task.out)
        if task in state.prefilling:
            end = min(end, -(-task.sequence.num_computed // state.block_tokens) - len(task.job.load))
        first = task.copied
        while free_halves and first < end and not task.problem:
            entries = task.out[first : min(end, first + state.staging.half_blocks)]
            pages = [page for number, _ in entries for page in state.block_pages(task, number, 1)]
            numbers, places = [number for number, _ in entries], [place for _, place in entries]
            groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, first, numbers=numbers))
            first += len(entries)
    return groups
