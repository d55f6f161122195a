    left: Counter[int] = Counter()
    growths, chunks = [], []

    def decode(task: Task) -> None:
        needed, copied = state.next_pages(task, left)
        if not needed:
            chunks.append(_chunk(task, 1, task.sequence.pages, prompt=False))
        elif needed <= draft.num_available:
            growth, pages = _grown(task, draft, needed, copied)
            for page in copied:
                left[page] += 1
            growths.append(growth)
            chunks.append(_chunk(task, 1, pages, prompt=False))

    for task in state.running:
        decode(task)
    prompts = _prompts(state, ahead)
    budget = state.limits.tokens - len(chunks)
    if budget < 1:
        budget = 1
    budget = _level(state, budget, prompts)
    wanted = [len(t.sequence.token_ids) - t.sequence.num_computed for t in prompts]
    sizes = chunk_sizes(budget, wanted) if state.limits.chunked else whole_prompts(budget, wanted)
    chunks += [_chunk(t, n, t.sequence.pages) for t, n in zip(prompts, sizes) if n > 0]
    return growths, chunks
