    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return Wait("sent") if at.flying else None
    layers = at.groups[at.taken]
    if layers.start >= at.reached:
        return None if at.aborted else Wait("computed")
    if at.flying > 1:
        return Wait("sent")
    return Take(layers, at.taken % 2)
