    groups = []
    for task in tasks:
        ready = len(task.out)
        if any(other is task for other in state.prefilling):
            ready = sum(
                (number + 1) * state.block_tokens <= task.sequence.num_computed for number, _ in task.out
            )
        for first in range(task.copied, ready, state.staging.half_blocks):
            if task.problem or not free_halves:
                break
            chosen = task.out[first : first + state.staging.half_blocks][: ready - first]
            half = free_halves[0]
            del free_halves[0]
            groups.append(
                WriteGroup(
                    half=half,
                    pages=[page for number, _ in chosen for page in state.block_pages(task, number, 1)],
                    places=[place for _, place in chosen],
                    job=task.id,
                    first=first,
                    numbers=tuple(number for number, _ in chosen),
                )
            )
    return groups
