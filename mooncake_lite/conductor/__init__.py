"""Rank 0: passes events to the control plane, and its effects to ranks and gateways."""
