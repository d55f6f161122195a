    line = iter(state.waiting)
    leave = state.num_next_pages()

    def begin(active: int, prompts: int, loading: bool) -> list[Admission]:
        task = next(line, None)
        if task is None or (active != 0 and active + task.num_sequences > state.limits.sequences):
            return []
        if PREFILL in task.job.duties:
            prompts += 1
            if prompts > state.limits.prefills:
                return []
        match, loads = _found(state, task, draft)
        if loading and loads:
            return []
        tokens = len(task.sequence.token_ids)
        pages = draft.keep_and_take(match, -(-tokens // state.pages.page_tokens), leave)
        if pages is None and not task.is_prefetch:
            return []
        mine = _admission(state, task, pages, loads)
        reads = mine.loads and not mine.by_layers
        return [mine, *begin(active + task.num_sequences, prompts, loading or reads)]

    return begin(state.num_active, state.num_prefills, state.loading is not None)
