"""The assignment system: labs are folders, solutions are marked regions of the real modules.

Used by `mooncake-lite labs`. Only this package and the folders of labs know that there are labs.
Explained in docs/explain/labs.md.
"""
