"""Configuration: what a user may set, what this machine has, and the small things that all rooms share.

`serve.py` has every flag of `serve`; it imports the others. Nothing here knows the rooms above it.
"""
