"""Two flags of `pytest tests/mooncake_lite/control`: repeat one run with faults, rewrite scenarios."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-seed",
        type=int,
        default=None,
        metavar="SEED",
        help="run the world of this seed alone, with every invariant checked after every event",
    )
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        default=False,
        help="replace effects and books in the scenarios by the real ones, and read the diff",
    )
