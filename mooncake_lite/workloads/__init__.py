"""Workloads: traces of requests, what is done with them before they are played, and how a run is measured.

    read_any, made -> Trace -> divided, spread, sped -> played live or simulated -> Record -> summary

It knows neither servers nor simulated clusters. Explained in docs/how-to/replay-a-trace.md.
"""
