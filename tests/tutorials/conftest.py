"""One flag: `pytest tests/tutorials --rewrite-tutorials` writes what pages really print into the pages."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-tutorials",
        action="store_true",
        default=False,
        help="replace the outputs and figures of the pages by the real ones, and read the diff",
    )
