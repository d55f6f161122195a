"""The reference pages and docs/explain/lifecycle.md name what the code has, and nothing else."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.cluster_metrics import HELP
from mooncake_lite.gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from mooncake_lite.gateway.endpoints import ENDPOINTS
from mooncake_lite.gateway.fields import NEUTRAL
from scheduler.instance.limits import ROW_COSTS
from store.books.ledger import COUNTERS as POOL_COUNTERS
from store.tier import COUNTERS as TIER_COUNTERS
from transport.channel import Counters

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
HTTP = (ROOT / "docs/reference/http.md").read_text(encoding="utf-8")
LIFECYCLE = (ROOT / "docs/explain/lifecycle.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
FIRST_CELL = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)


def cells(page: str, begin: str, end: str) -> set[str]:
    """What stands in backquotes in the first cells of the tables between two lines of a page."""
    part = page.partition(begin)[2].partition(end)[0]
    return {name for cell in FIRST_CELL.findall(part) for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_lists_each_endpoint_with_its_method() -> None:
    routes = {f"{method} {endpoint.path}" for endpoint in ENDPOINTS for method in endpoint.methods}

    assert len(routes) > 5
    assert cells(HTTP, "## Endpoints", "The key is wanted") == routes


def test_the_page_lists_each_field_that_the_bodies_have() -> None:
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}

    assert cells(HTTP, "## Fields of a request", "A field that would change") == fields


def test_the_page_lists_each_refused_field_with_the_values_that_are_accepted() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", HTTP.partition("| refused |")[2].split("\n\n")[0], re.M)
    code = [
        (name, ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values))
        for name, values in NEUTRAL.items()
    ]

    assert rows == code


def test_the_page_names_the_fields_of_tokenize_and_detokenize() -> None:
    part = HTTP.partition("## Tokens")[2].partition("## Errors")[0]

    for field in (*TokenizeBody.__struct_fields__, *DetokenizeBody.__struct_fields__):
        assert f"`{field}`" in part


def test_the_page_lists_each_metric_of_the_conductor() -> None:
    counted = (f"control_{name}_total" for name in Counters().as_dict())
    names = {*HELP, "schedule_decision_seconds", "events_ignored_total", *counted}

    assert cells(METRICS, "## Of the conductor", "The pool, from") == names


def test_the_page_lists_each_counter_of_a_rank_that_computes() -> None:
    code = (ROOT / "mooncake_lite/ranks/computing/machine.py").read_text(encoding="utf-8")
    counted = set(re.findall(r'self\.counters\["(\w+)"\]', code))

    assert "spec_decode_num_draft_tokens_total" in counted
    assert counted <= cells(METRICS, "Prefill, decode and compute ranks;", "Store ranks;")


def test_the_page_of_drafts_has_the_costs_by_which_they_are_chosen() -> None:
    page = (ROOT / "docs/explain/speculation.md").read_text(encoding="utf-8")
    rows, costs = (
        re.findall(r"[\d.]+", page.partition(f"| {name} |")[2].partition("\n")[0])
        for name in ("rows of a pass", "cost")
    )

    assert [(int(row), float(cost)) for row, cost in zip(rows, costs, strict=True)] == list(ROW_COSTS)


def test_the_page_lists_each_counter_of_the_pool_and_of_the_tier() -> None:
    pool = cells(METRICS, "The pool, from", "## Of the ranks")
    tier = cells(METRICS, "Store ranks;", "## Some questions")

    assert {name for name in pool if name.endswith("_total")} == {
        f"pool_{name.removeprefix('pool_')}_total" for name in POOL_COUNTERS
    }
    assert {f"tier_{name}_total" for name in TIER_COUNTERS} <= tier


def reported() -> tuple[type, ...]:
    """The events that travel in a Report."""
    return typing.get_args(typing.get_type_hints(m.Report)["event"])


def test_the_life_of_a_request_lists_each_message_about_one_and_no_other() -> None:
    unions = (m.TO_CONDUCTOR, m.TO_GATEWAY, m.TO_COMPUTE, m.TO_STORE)
    known = {message for union in unions for message in typing.get_args(union)} | {m.TO_GATEWAY_TOKENS}
    known |= {*typing.get_args(m.StartOrder), *reported()}
    about = {message.__name__ for message in known if "request_id" in message.__struct_fields__}
    listed = cells(LIFECYCLE, "## The messages of a request", "### Attempts and epochs")

    assert len(about) > 10
    assert about <= listed <= {message.__name__ for message in known}


@pytest.mark.parametrize(
    ("paths", "begin", "end"),
    [
        (["gateway/exposition.py"], "## Of the gateway", "## Of the conductor"),
        (
            ["ranks/computing/machine.py", "ranks/computing/loop.py", "ranks/metrics.py"],
            "Prefill, decode and compute ranks;",
            "Store ranks;",
        ),
    ],
    ids=["gateway", "compute ranks"],
)
def test_each_metric_of_the_page_is_in_the_code(paths: list[str], begin: str, end: str) -> None:
    code = "".join((ROOT / "mooncake_lite" / path).read_text(encoding="utf-8") for path in paths)
    names = cells(METRICS, begin, end)

    assert len(names) > 5
    for name in names:
        assert f'"{name}"' in code or f'"{name.removesuffix("_total")}"' in code
