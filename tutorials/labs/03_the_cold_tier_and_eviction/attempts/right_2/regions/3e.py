    fd = _open(path)
    try:
        header = _read_header(fd, path)
        columns = (1, 1, 1, header.layout.layers)
        tables = [_read_table(fd, path, header, i, n) for i, n in enumerate(columns)]
        offsets, keys, digests = (table.ravel() for table in tables[:3])
        _check_offsets(offsets, header, path)
        ranges = [*_gaps(offsets, header.layout.nbytes, header.file_nbytes)]
        if header.metadata_hash != _hash_ranges(fd, ranges, path):
            raise SegmentFileError(path, "bytes between the blocks are corrupt")
    finally:
        os.close(fd)
    same = layout is None or (layout, fingerprint) == (header.layout, header.fingerprint)
    return SealedFile(path, number, header, keys, digests, offsets, tables[3], same_kind=same)
