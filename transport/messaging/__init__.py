"""The parts of messages between processes: sockets, addresses, and the ends of other processes.

    lines        questions and answers over a Unix socket, for callers that wait
    publisher    numbered messages to all listeners
    descriptors  the limit on file descriptors, and how a server refuses a connection
    pids         the ends of other processes of this host
    address      the address at which other hosts reach this one
    curve        keys of ZeroMQ's encryption
    waker        a pipe that ends the poll of another thread

The door is `transport.channel`: one Hub and many Spokes. `transport.membership` watches who is alive.
Explained in docs/explain/transport.md.
"""
