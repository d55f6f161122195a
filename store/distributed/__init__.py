"""Mooncake's own API over our pool: a master with the books, clients that lend and use memory, no MPI.

`store` exports the class itself; all else here is internal. Importing this package loads nothing. Explained
in docs/explain/leases.md.
"""
