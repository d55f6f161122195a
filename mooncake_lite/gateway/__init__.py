"""The HTTP side of a cluster: a process that speaks OpenAI's API to clients and messages to ranks.

Started by rank 0 as `python -m mooncake_lite.gateway RUN_DIR`. Loads a tokenizer, never torch and
never MPI, so that its work cannot disturb a scheduling decision. Explained in docs/explain/lifecycle.md.
"""
