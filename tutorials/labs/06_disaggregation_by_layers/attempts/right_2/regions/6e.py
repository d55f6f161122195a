    def compute():
        task.read = task.to_load = first
        return _loaded(state, task, now) if task.landed >= first else []

    if task.by_layers:
        state.prefilling.remove(task)
        task.by_layers = False
        return compute()
    task.failed_reads = task.failed_reads + 1
    if task.failed_reads > MOST_READ_AGAIN:
        if task.is_prefetch:
            return [preempt(state, task, now)]
        if PREFILL in task.job.duties:
            return compute()
        state.loading = None
        return _fail(state, task, problem)
    task.read = first
    return []
