"""The fault world: the simulator's World (mooncake_lite/simulator/world.py), with everything drawn, followed
and checked. Explained in docs/explain/control.md.
"""
