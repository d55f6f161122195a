"""What would happen: traces played against the same policies that serve.

Mounted as `mooncake-lite simulate`. It has no processes, sockets or clocks: time is that of the trace.
Explained in docs/explain/eviction.md.
"""
