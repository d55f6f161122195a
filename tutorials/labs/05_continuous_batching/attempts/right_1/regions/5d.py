    left: Counter[int] = Counter()
    for task in state.swapping:
        num_free += _leave(state, task, left)
    batch = list(state.running)
    leaves = Counter(left)
    needed = 0
    for task in batch:
        count, copied = state.next_pages(task, leaves)
        leaves.update(copied)
        needed += count
    if needed > num_free and state.loading is not None and state.loading.is_prefetch:
        return [state.loading]
    preempted: list[Task] = []
    while needed > num_free:
        task = batch.pop()
        needed -= state.next_pages(task, left)[0]  # or one of its twins needs no copy any more
        num_free += _leave(state, task, left)
        preempted.append(task)
    return preempted
