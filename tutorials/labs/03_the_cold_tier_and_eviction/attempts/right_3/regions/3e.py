    with _Source(path) as source:
        header = source.header()
        offsets = source.table(header, "offsets")
        _check_offsets(offsets, header, path)
        gaps = []
        for gap in _gaps(offsets, header):
            gaps.append(gap)
        if source.hash_of(gaps) != header.metadata_hash:
            raise SegmentFileError(path, "wrong metadata hash")
        sealed = SealedFile(
            path=path,
            number=number,
            header=header,
            offsets=offsets,
            keys=source.table(header, "keys"),
            digests=source.table(header, "digests"),
            checksums=source.table(header, "checksums"),
        )
    if layout is not None:
        sealed.same_kind = header.layout == layout and header.fingerprint == fingerprint
    return sealed
