"""Tests of labs get the fixture `lab`, and run once for each seed. They run in the parent; see judging.py."""

from mooncake_lite.labs.judging import _children, lab, pytest_generate_tests  # noqa: F401
