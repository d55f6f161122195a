    if task.by_layers:
        task.by_layers = False
        state.prefilling.remove(task)
    else:
        task.failed_reads += 1
        if task.failed_reads <= MOST_READ_AGAIN:
            task.read = first
            return []
        if task.is_prefetch:
            return [preempt(state, task, now)]
        if PREFILL not in state.duties:
            state.stop_loading()
            return _fail(state, task, problem)
    task.read = task.to_load = first
    return _loaded(state, task, now) if task.landed == first else []
