    with _Source(path) as source:
        header = source.header()
        offsets = source.table(header, "offsets")
        _check_offsets(offsets, header, path)
        if source.hash_of(_gaps(offsets, header)) != header.metadata_hash:
            raise SegmentFileError(path, "metadata is corrupt: its hash differs")
        keys = source.table(header, "keys")
        digests = source.table(header, "digests")
        checksums = source.table(header, "checksums")
    same_kind = layout is None or (header.layout == layout and header.fingerprint == fingerprint)
    if not same_kind:
        raise SegmentFileError(path, "foreign")
    return SealedFile(path, number, header, keys, digests, offsets, checksums, same_kind)
