    left: Counter[int] = Counter()
    gone = (*state.swapping, *reversed(state.running))
    free, kept = num_free + sum(_leave(state, task, left) for task in gone), 0
    batch = [*state.running]
    for task in batch:  # as if all had left: they come back, the oldest first, as long as there are pages
        held = [page for page in task.sequence.pages if left[page] == state.pages.used[page]]
        left.subtract(task.sequence.pages)
        free -= len(held) + state.next_pages(task, left)[0]
        if free < 0:
            break
        kept += 1
    prefetch = state.loading is not None and state.loading.is_prefetch
    if kept < len(batch) and prefetch:
        return [state.loading]
    return batch[kept:][::-1]
