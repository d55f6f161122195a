"""The steward: rank 0, which keeps the conductor and the gateway alive and sees which processes end."""
