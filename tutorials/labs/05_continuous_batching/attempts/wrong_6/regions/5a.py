    active, prefills = state.num_active, state.num_prefills
    loading = state.loading is not None
    leave = state.num_next_pages()
    admissions: list[Admission] = []
    for task in state.waiting:
        if active and active + task.num_sequences > state.limits.sequences:
            break
        is_prompt = PREFILL in task.job.duties
        if is_prompt and prefills >= state.limits.prefills:
            break
        match, loads = _found(state, task, draft)
        total = state.pages.needed(len(task.sequence.token_ids))
        pages = draft.keep_and_take(match, total, leave)
        if loads and loading:
            break
        if pages is None and not task.is_prefetch:
            break
        admission = _admission(state, task, pages, loads)
        admissions.append(admission)
        active += task.num_sequences
        prefills += is_prompt
        loading = loading or (admission.loads and not admission.by_layers)
    return admissions
