"""What each MPI rank does: one file a role, `rank.py` starts and ends them all."""
