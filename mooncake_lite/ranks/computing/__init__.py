"""A rank that computes: prefill, decode, or both.

`machine.py` is the rank without I/O: orders and results in, steps and reports out. `loop.py` drives it with
messages, a clock and a runner; the simulator drives it in virtual time. See docs/explain/lifecycle.md.
"""
