"""mooncake-lite: a KVCache-centric, disaggregated LLM server that a student can read."""

__version__ = "0.1.0"
