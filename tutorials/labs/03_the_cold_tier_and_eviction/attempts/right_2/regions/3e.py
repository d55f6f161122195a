    with _Source(path) as source:
        header = source.header()
        tables = {name: source.table(header, name) for name in ("offsets", "keys", "digests", "checksums")}
        _check_offsets(tables["offsets"], header, path)
        ranges = [*_gaps(tables["offsets"], header)]
        if header.metadata_hash != source.hash_of(ranges):
            raise SegmentFileError(path, "bytes between the blocks are corrupt")
    same = layout is None or (layout, fingerprint) == (header.layout, header.fingerprint)
    return SealedFile(path, number, header, **tables, same_kind=same)
