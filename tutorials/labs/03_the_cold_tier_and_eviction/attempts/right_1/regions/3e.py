    fd = _open(path)
    try:
        header = _read_header(fd, path)
        offsets = _read_table(fd, path, header, 0, 1)[:, 0]
        _check_offsets(offsets, header, path)
        gaps = list(_gaps(offsets, header.layout.nbytes, header.file_nbytes))
        if _hash_ranges(fd, gaps, path) != header.metadata_hash:
            raise SegmentFileError(path, "metadata is corrupt: its hash differs")
        keys = _read_table(fd, path, header, 1, 1)[:, 0]
        digests = _read_table(fd, path, header, 2, 1)[:, 0]
        checksums = _read_table(fd, path, header, 3, header.layout.layers)
    finally:
        os.close(fd)
    same_kind = layout is None or (header.layout == layout and header.fingerprint == fingerprint)
    return SealedFile(path, number, header, keys, digests, offsets, checksums, same_kind)
