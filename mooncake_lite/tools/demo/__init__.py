"""The demo: one long document, three questions, four clusters, and a table of what reuse is worth.

Called by `mooncake-lite demo` (and `make demo`). It is a client like any other: it starts `mooncake-lite
serve` as a child process, talks HTTP to it and knows nothing of ranks, MPI or the store's insides.
What it shows is explained in docs/explain/paper.md, which is also the document it asks about.
"""
