    if not task.by_layers:
        task.failed_reads += 1
        if task.failed_reads <= MOST_READ_AGAIN:
            task.read = first
            return []
        if task.is_prefetch:
            return [preempt(state, task, now)]
        if PREFILL not in task.job.duties:
            state.loading = None
            return _fail(state, task, problem)
    else:
        state.prefilling.remove(task)
        task.by_layers = False
    task.to_load = first
    task.read = first
    if task.landed < first:
        return []
    return _loaded(state, task, now)
