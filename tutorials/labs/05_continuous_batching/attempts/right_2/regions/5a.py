    limits = state.limits
    begun: list[Task] = []
    admissions: list[Admission] = []
    kept_back = state.num_next_pages()
    for task in state.waiting:
        active = state.num_active + sum(other.num_sequences for other in begun)
        if active > 0 and active + task.num_sequences > limits.sequences:
            return admissions
        prompts = state.num_prefills + len([1 for other in begun if PREFILL in other.job.duties])
        if PREFILL in task.job.duties and prompts >= limits.prefills:
            return admissions
        shared, loads = _found(state, task, draft)
        busy = state.loading or any(a.loads and not a.by_layers for a in admissions)
        if loads and busy:
            return admissions
        size = state.pages.needed(len(task.sequence.token_ids))
        found = draft.keep_and_take(shared, size, leave=kept_back)
        if not found and not task.is_prefetch:
            return admissions
        begun += [task]
        admissions += [_admission(state, task, found, loads)]
    return admissions
