"""Profiles of performance: what a real engine was measured to take, in a versioned file. Start at file.py."""
