"""Starting, watching and stopping the ranks of one cluster on this machine.

Used by the command line (launcher side) and by the ranks (`rank_process`, `run_dir`, `threads`). It
knows processes, files and mpirun; never messages' meaning, KV or models' insides. The starter of clusters
for other programs is `serve_child.Cluster`: a whole cluster as one child process.
Explained in docs/explain/lifecycle.md, "Before the first request".
"""
