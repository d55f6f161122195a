    groups = []
    for task in tasks:
        end = len(task.out)
        if task in state.prefilling:
            end = min(end, task.sequence.num_computed // state.block_tokens - len(task.job.load))
        if free_halves and task.copied < end and not task.problem:
            entries = task.out[task.copied : min(end, task.copied + state.staging.half_blocks)]
            pages = [page for number, _ in entries for page in state.block_pages(task, number, 1)]
            numbers, places = [number for number, _ in entries], [place for _, place in entries]
            half = free_halves.pop(0)
            groups.append(WriteGroup(half, pages, places, task.id, task.copied, numbers=numbers))
    return groups
