    if task.by_layers:
        task.by_layers = False
        state.prefilling.remove(task)
    elif task.is_prefetch:
        return [preempt(state, task, now)]
    elif PREFILL not in task.job.duties:
        state.loading = None
        return _fail(state, task, problem)
    task.failed_reads += 1
    task.read = task.to_load = first
    return _loaded(state, task, now) if task.landed == first else []
