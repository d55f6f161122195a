"""The master of a store: the process that keeps the books of all objects, and notices when clients die.

    master      listens, publishes the table in shared memory, and removes what is left of the dead
    catalogue   the verbs: puts, lookups, removals, copies; start here
    books, entries   what is kept of each object, segment and client
    eviction    which object goes first
    tasks       copies and moves, which clients carry out

Clients never import this. Explained in docs/explain/leases.md.
"""
