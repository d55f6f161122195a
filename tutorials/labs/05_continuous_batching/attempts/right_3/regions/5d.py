    batch = [*state.running]

    def fits(gone: int) -> bool:
        """Tell whether the pages suffice when so many of the youngest leave."""
        left: Counter[int] = Counter()
        free, needed, stay = num_free, 0, len(batch) - gone
        for task in [*state.swapping, *batch[stay:]]:
            free += _leave(state, task, left)
        for task in batch[:stay]:
            pages, leaves = state.next_pages(task, left)
            left.update(leaves)
            needed += pages
        return needed <= free

    low, high = 0, len(batch)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    if low and state.loading is not None and state.loading.is_prefetch:
        return [state.loading]
    return batch[::-1][:low]
