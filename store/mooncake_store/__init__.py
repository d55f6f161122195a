"""Mooncake's own API over our pool: a master with the books, clients that lend and use memory, no MPI.

The door is `store`, which exports the class itself; all else here is internal. Importing this package loads
nothing. Explained in docs/explain/leases.md.

    api, config, arguments, codes, replicas, tensors, ranges, buffers   what a program calls, and gets
    session, client, segments     membership of a master, and the memory that a client lends and uses
    reader, writer, copying       gets, puts, replicas
    shared_table, journal, memory, memory_left   what processes of one machine share without a message
    link, messages                the conversation with the master
    master/                       the process that keeps the books
"""
