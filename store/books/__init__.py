"""The books of the directory: objects, owners, leases and space, kept exact.

    ledger        the class that `Directory` inherits from: it holds the books below
    allocation    finds space for new objects, and evicts others for them
    segment, segment_order   one rank's memory, and the order in which segments are tried
    leases, quarantine       who reads or writes an object, and ranges that late bytes may reach
    general       verbs for single objects: copies, pins, removal
    hints, trust  verbs of hints, and what the hints of a tenant have cost compared with LRU
    tier_index, promotion, adoption   blocks on SSD, blocks that stay in DRAM, blocks of an earlier directory

The door is `store.directory`, which adds the verbs for runs of KV blocks. Explained in
docs/explain/lifecycle.md.
"""
