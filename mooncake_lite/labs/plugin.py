"""The pytest plugin of a run of a lab's tests: it reads a `Run` and writes its `Outcome`.

Loaded by running.py with `-p`. The fixture and everything that a test may use is in judging.py.
Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from mooncake_lite.labs.confine import follow_parent
from mooncake_lite.labs.judging import MOST_SHOWN, RUN, SESSIONS, Case, Run, repeat, task_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --lab-run."""
    parser.addoption("--lab-run", required=True, metavar="FILE", help="the run, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Read the run."""
    config.stash[RUN] = msgspec.json.decode(Path(config.getoption("--lab-run")).read_bytes(), type=Run)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the private tests last: then no public test can show inputs that a region has kept from them."""
    items.sort(key=lambda item: item.name.endswith("[private]"))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Run the collected tests for each variant, in a fork each time: no state survives to the next one."""
    run, made = session.config.stash[RUN], session.config.stash.get(SESSIONS, {})
    for variant in run.variants:
        (Path(run.tree) / variant.file).write_text(variant.text, encoding="utf-8")
        if (child := os.fork()) == 0:
            follow_parent()
            try:
                return (yield)
            finally:
                for one in made.values():
                    one.close()
                    Path(variant.results).write_bytes(msgspec.json.encode(one.outcome))
                os._exit(0)
        os.waitpid(child, 0)
    if run.variants:
        session.items.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each test that passed or failed; a skipped one counts nowhere."""
    report = yield
    if report.skipped or (report.when != "call" and report.passed):
        return report
    name, _, seed = item.name.partition("[")
    message = "" if report.passed else _in_words(item, call, str(report.longrepr))
    for session in item.config.stash.get(SESSIONS, {}).values():
        session.outcome.cases.append(
            Case(task_of(item.path), name.removeprefix("test_"), seed.rstrip("]"), report.passed, message)
        )
    return report


def _in_words(item: pytest.Item, call: pytest.CallInfo[None], said: str) -> str:
    """Return why a test failed. What a test itself raises comes from a reply that no region can have made."""
    if call.excinfo is None or isinstance(call.excinfo.value, pytest.fail.Exception):
        return said
    task, why = task_of(item.path), " ".join(call.excinfo.exconly().split())[:MOST_SHOWN]
    return f"stopped    the reply cannot be judged: {why}\n{repeat(int(task[:-1]), task)}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcome. Those of variants are written."""
    for made in session.config.stash.get(SESSIONS, {}).values():
        if not made.run.variants:
            Path(made.run.results).write_bytes(msgspec.json.encode(made.outcome))
