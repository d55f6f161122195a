"""The MPI ranks that work, and what every rank has whatever its role: its process, metrics and traces.

`computing/` is prefill, decode or both; `store/` lends DRAM to the pool and keeps the SSD tier. `assemble.py`
builds them; `mooncake_lite/rank.py` starts and ends every rank, the conductor's too.
"""
