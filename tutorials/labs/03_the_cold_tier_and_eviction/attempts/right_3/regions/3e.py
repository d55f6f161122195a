    with os.fdopen(_open(path), "rb", buffering=0) as file:
        fd = file.fileno()
        header = _read_header(fd, path)
        offsets = _read_table(fd, path, header, 0, 1).reshape(-1)
        _check_offsets(offsets, header, path)
        gaps = []
        for gap in _gaps(offsets, header.layout.nbytes, header.file_nbytes):
            gaps.append(gap)
        if _hash_ranges(fd, gaps, path) != header.metadata_hash:
            raise SegmentFileError(path, "wrong metadata hash")
        sealed = SealedFile(
            path=path,
            number=number,
            header=header,
            offsets=offsets,
            keys=_read_table(fd, path, header, 1, 1).reshape(-1),
            digests=_read_table(fd, path, header, 2, 1).reshape(-1),
            checksums=_read_table(fd, path, header, 3, header.layout.layers),
        )
    if layout is not None:
        sealed.same_kind = header.layout == layout and header.fingerprint == fingerprint
    return sealed
