"""The conductor, a child process of rank 0: passes events to the control plane, and its effects to others."""
