    left: Counter[int] = Counter()
    plan: list[tuple[Growth | None, Chunk]] = []
    for task in state.running:
        needed, copied = state.next_pages(task, left)
        growth, pages = None, task.sequence.pages
        if draft.num_available - needed < 0:
            continue
        if needed > 0:
            growth, pages = _grown(task, draft, needed, copied)
            left += Counter(copied)
        plan.append((growth, _chunk(task, 1, pages, prompt=False)))
    grown = [growth for growth, _ in plan if growth is not None]
    chunks = [chunk for _, chunk in plan]
    prompts = _prompts(state, ahead)
    if len(prompts) == 0:
        return grown, chunks
    rest = max(state.limits.tokens - len(plan), 1)
    rest = _level(state, rest, prompts)
    share = {True: chunk_sizes, False: whole_prompts}[state.limits.chunked]
    sizes = share(rest, tuple(map(lambda task: task.sequence.num_uncomputed, prompts)))
    for number in range(len(prompts)):
        if sizes[number] == 0:
            continue
        chunks.append(_chunk(prompts[number], sizes[number], prompts[number].sequence.pages))
    return grown, chunks
