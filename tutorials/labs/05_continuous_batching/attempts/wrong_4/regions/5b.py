    growths: list[Growth] = []
    chunks: list[Chunk] = []
    left: Counter[int] = Counter()
    for task in state.running:
        needed, copied = state.next_pages(task, left)
        if needed > draft.num_available:
            continue
        pages = task.sequence.pages
        if needed:
            growth, pages = _grown(task, draft, needed, copied)
            growths.append(growth)
            left.update(copied)
        chunks.append(_chunk(task, 1, pages, prompt=False))
    prompts = _prompts(state, ahead)
    if not prompts:
        return growths, chunks
    budget = _level(state, max(1, state.limits.tokens - len(chunks)), prompts)
    wanted = [task.sequence.num_uncomputed for task in prompts]
    share = chunk_sizes if state.limits.chunked else whole_prompts
    for task, size in zip(prompts, share(budget, wanted)):
        chunks.append(_chunk(task, size, task.sequence.pages))
    return growths, chunks
