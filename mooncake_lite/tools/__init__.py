"""Programs beside the server: benchmarks, demo, chat, top, doctor, and the commands that inspect a cluster.

The command line starts them. No other room imports this one.
"""
