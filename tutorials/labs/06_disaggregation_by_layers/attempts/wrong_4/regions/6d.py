    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return None
    layers = at.groups[at.taken]
    if layers.stop > at.reached:
        return None if at.aborted else Wait("computed")
    if at.flying > 1:
        return Wait("sent")
    return Take(layers, at.taken % 2)
