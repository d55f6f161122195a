    if at.taken > at.begun:
        return Send()
    if at.taken < len(at.groups):
        group = at.groups[at.taken]
        computed = group.stop <= at.reached
        if computed and at.flying < 2:
            return Take(group, at.taken % 2)
        if computed:
            return Wait("sent")
        return None if at.aborted else Wait("computed")
    return Wait("sent") if at.flying else None
