"""The parts of the transfer engine (segments, batches, the paths on which bytes travel) and of exchanges.

    segments, lent        memory that other ranks may read and write
    batch, jobs, slices   what a caller asks for, and how it is cut into messages
    copier                copies within a node
    courier, requests, exchange          two-sided MPI, with small requests over ZeroMQ
    one_sided, flight                    one-sided MPI
    socket_path, sockets, sockets_server, sockets_messages, socket_io   plain TCP
    links, remote         which path a job takes, and its second try
    futex                 counters on which the members of a `transport.exchange` sleep

The doors are `transport.engine` and `transport.exchange`. Explained in docs/explain/transport.md.
"""
