    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return Wait("sent") if at.flying else None
    group = at.groups[at.taken]
    if at.reached < group.stop:
        return Wait("computed") if not at.aborted else Wait("sent") if at.flying else None
    if at.flying > 1:
        return Wait("sent")
    return Take(group, at.taken % 2)
