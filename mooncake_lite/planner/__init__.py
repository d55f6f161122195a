"""How many of each: the smallest cluster that keeps the SLOs of a workload, its cost, and why not one fewer.

    Trace -> jobs -> closed forms -> replay of queues -> simulations -> Answer

It asks the simulator and knows nothing of how that works. Explained in docs/explain/planning.md.
"""
