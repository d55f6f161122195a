"""The roles of MPI ranks, one file per role. `rank.py` starts and ends all of them."""
