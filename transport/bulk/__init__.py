"""The parts of the transfer engine: segments, batches, and the paths on which bytes travel.

    segments, lent        memory that other ranks may read and write
    batch, jobs, slices   what a caller asks for, and how it is cut into messages
    copier                copies within a node
    courier, requests, exchange          two-sided MPI, with small requests over ZeroMQ
    one_sided, flight                    one-sided MPI
    socket_path, sockets, sockets_server, sockets_messages, socket_io   plain TCP
    links, remote         which path a job takes, and its second try

The door is `transport.engine`. Explained in docs/explain/transport.md.
"""
