"""Bytes between ranks (memory, MPI, TCP), messages between processes (ZeroMQ), and heartbeats.

Used by `store` and by the roles of `mooncake_lite`; knows nothing of KV, models or requests.
Importing this package loads neither MPI nor ZeroMQ. Import from its modules
(`wire`, `channel`, `membership`, `world`, `engine`, `exchange`, `errors`).

    channel, membership   typed messages and heartbeats; their parts are in messaging/
    engine, world         transfers of bytes, and MPI; the parts of the engine are in bulk/
    exchange              sums and gathers of members that compute in lockstep
    wire, threads         the encoding of messages; the one way to start a thread
"""
