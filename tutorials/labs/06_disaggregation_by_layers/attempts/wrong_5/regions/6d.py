    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return Wait("sent") if at.flying else None
    if at.aborted:
        return None
    if at.reached < at.groups[-1].stop:
        return Wait("computed")
    if at.flying > 1:
        return Wait("sent")
    return Take(at.groups[at.taken], at.taken % 2)
