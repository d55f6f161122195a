"""Runs a model over paged KV on one rank. Start reading at runner.py."""
