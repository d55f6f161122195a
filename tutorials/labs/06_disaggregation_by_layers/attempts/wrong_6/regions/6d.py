    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return Wait("sent") if at.flying else None
    group = at.groups[at.taken]
    if at.reached < group.stop:
        return None if at.aborted else Wait("computed")
    if at.flying:
        return Wait("sent")
    return Take(group, at.taken % 2)
