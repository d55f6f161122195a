"""What every MPI rank has, whatever its role: its start, its process, its metrics, its traces.

`start.py` starts and ends all of them; `assemble.py` builds a working rank, `conductor/assemble.py` rank 0.
"""
