"""One name per fact: what ranks say and hear are the events and effects of the control plane themselves."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev

pytestmark = pytest.mark.quick

REPORTED = [kind for kind in get_args(get_type_hints(m.Report)["event"]) if issubclass(kind, ev.RankEvent)]
STARTED = get_args(get_type_hints(m.Start)["order"])
OF_RANKS = {kind for kind in get_args(ev.AnyEvent) if issubclass(kind, ev.RankEvent)}


def structs_of(module: Any) -> dict[str, type]:
    """The structs that a module defines itself, by name."""
    found = {name: each for name, each in vars(module).items() if isinstance(each, type)}
    return {
        name: each
        for name, each in found.items()
        if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    }


def test_every_event_of_a_rank_but_its_hello_reaches_the_conductor_as_it_is() -> None:
    plain = [kind for kind in get_args(m.TO_CONDUCTOR) if issubclass(kind, ev.RankEvent)]
    assert {*plain, *REPORTED} == OF_RANKS - {ev.RankJoined}
    assert not set(plain) & set(REPORTED), "an event comes with its tokens or without them"


def test_every_order_reaches_its_rank_as_it_is() -> None:
    compute, store = set(get_args(m.TO_COMPUTE)), set(get_args(m.TO_STORE))
    assert {*STARTED} == {*get_args(m.StartOrder)} == {*get_args(fx.StartOrder)}
    told = {m.Start, m.PrefetchTokens, m.GatewayAt, m.MarkLost, m.Stop}
    assert (compute | store | {*STARTED, fx.Prefetch}) - told == {*get_args(fx.Order)}
    assert compute & store == {m.MarkLost, m.Stop} == {fx.MarkLost, fx.Stop}


def test_what_gateways_hear_about_requests_are_effects() -> None:
    told = {kind for kind in get_args(m.TO_GATEWAY) if "request_id" in kind.__struct_fields__}
    assert told == {fx.Reject, fx.Release, fx.Fail, fx.Recall}


def test_no_message_has_the_name_of_an_event_or_an_effect() -> None:
    control = structs_of(ev) | structs_of(fx)
    for each in pkgutil.iter_modules(m.__path__):
        module = importlib.import_module(f"{m.__name__}.{each.name}")
        assert not structs_of(module).keys() & control.keys()
    for name in vars(m):
        if name in control:
            assert getattr(m, name) is control[name]
    assert len(control) > 50


def test_the_fields_of_an_event_begin_with_the_rank_that_caused_it_and_the_request() -> None:
    for kind in OF_RANKS:
        assert kind.__struct_fields__[:2] == ("rank", "epoch")
        if "request_id" in kind.__struct_fields__:
            assert issubclass(kind, ev.RequestEvent)
            assert kind.__struct_fields__[2:4] == ("request_id", "attempt")
    for order in get_args(fx.Order):
        assert order.__struct_fields__[0] == "rank"
