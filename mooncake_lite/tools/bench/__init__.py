"""Benchmarks: our parts beside a peer and a limit, measured in the same run on the same machine.

Called by `mooncake-lite bench`. Each module measures one package; `result.py` writes the JSON. A figure
of another day or machine never stands beside one of ours. Explained in docs/reference/cli.md.
"""
