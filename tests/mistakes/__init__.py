"""Mistakes as patches, and the tests that notice them. See docs/explain/what-tests-prove.md."""
