    if at.begun != at.taken:
        return Send()
    left = at.groups[at.taken :]
    if not left and not at.flying:
        return None
    if not left or at.flying == 2:
        return Wait("sent")
    if at.reached >= left[0].stop:
        return Take(left[0], at.taken % 2)
    if at.aborted:
        return None
    return Wait("computed")
