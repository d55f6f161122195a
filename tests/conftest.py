"""`pytest --soak N`: only the property tests, each with N times its examples, and other ones every time.

Used by `make soak`. Without the option tests are as they stand in their files: repeatable.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Before torch is loaded: threads that wait in a test must not take the cores from the cluster it tests."""

SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a test; test_soak.py fails when that changes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=0, metavar="N", help="property tests with N times the examples"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    factor = config.getoption("--soak")
    if not factor:
        return
    kept: list[pytest.Item] = []
    grown: set[int] = set()
    for item in items:
        holder, name = _settings_of(item)
        if holder is None:
            continue
        kept.append(item)
        if id(holder) not in grown:  # a parametrised test is one function, and grows once
            grown.add(id(holder))
            setattr(holder, name, _grown(getattr(holder, name), factor))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _settings_of(item: pytest.Item) -> tuple[Any, str]:
    """(what holds the settings, its attribute) of a property test or state machine; (None, "") of others."""
    function = getattr(item, "obj", None)
    if isinstance(getattr(getattr(item, "cls", None), "settings", None), settings):
        return item.cls, "settings"  # type: ignore[attr-defined]
    if function is None or not is_hypothesis_test(function):
        return None, ""
    function = getattr(function, "__func__", function)
    if not hasattr(function, SETTINGS):
        setattr(function, SETTINGS, settings.default)
    return function, SETTINGS


def _grown(old: settings, factor: int) -> settings:
    """More examples, drawn anew in every run; a failure prints how to repeat it."""
    return settings(
        old, max_examples=old.max_examples * factor, derandomize=False, deadline=None, print_blob=True
    )
