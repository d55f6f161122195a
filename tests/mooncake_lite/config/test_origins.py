"""Which web pages may read the answers of a server."""

from __future__ import annotations

import pytest

from mooncake_lite.config.origins import Origins, hosts_of, parse_origins
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", Origins()),
        ("*", Origins(every=True)),
        ("loopback", Origins(loopback=True)),
        (" https://a.example , loopback", Origins(loopback=True, named=("https://a.example",))),
        ("HTTPS://A.example:443,http://b:80", Origins(named=("https://a.example", "http://b"))),
        ("http://[2001:db8::1]:3000", Origins(named=("http://[2001:db8::1]:3000",))),
        ("chrome-extension://abc", Origins(named=("chrome-extension://abc",))),
    ],
)
def test_a_list_of_origins_is_kept_as_browsers_write_them(text: str, origins: Origins) -> None:
    assert parse_origins(text) == origins


@pytest.mark.parametrize(
    "wrong",
    [
        "a.example", "null", "https://a.example/", "https://a.example/page", "https://*.example",
        "https://user@a.example", "https://a.example:99999", "https://ä.example", "",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin") as refused:
        ServeConfig(allowed_origins=f"https://right.example,{wrong}")

    assert repr(wrong) in str(refused.value)


def test_by_default_pages_of_this_machine_are_allowed_at_any_port() -> None:
    origins = parse_origins(ServeConfig().allowed_origins)

    for origin in ("http://localhost:3000", "https://localhost", "http://127.0.0.1:80", "http://[::1]:5173"):
        assert origins.allows(origin)
    for origin in (
        "https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example:80",
        "http://localhost:80@evil.example", "null", "file://", "http://localhost:3000/",
    ):  # fmt: skip
        assert not origins.allows(origin)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8000", True), ("LocalHost.", True), ("127.0.0.1:80", True), ("10.1.2.3", True),
        ("[::1]:8000", True), ("llm.example:443", True), ("box", True),
        ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False),
        ("llm.example@evil.example", False), ("localhost:x", False), ("::1", False), ("", False),
    ],
)  # fmt: skip
def test_a_server_is_called_by_an_address_or_by_a_name_that_it_knows(host: str, known: bool) -> None:
    assert hosts_of(" LLM.example ", "127.0.0.1", ["Box"]).knows(host) is known


def test_names_are_checked_on_loopback_and_where_the_flag_is_given() -> None:
    bound = {"127.0.0.1": True, "::1": True, "0.0.0.0": False, "::": False, "10.1.2.3": False}
    assert {address: hosts_of("", address, ()).checked for address in bound} == bound
    assert hosts_of("llm.example", "0.0.0.0", ()).checked


@pytest.mark.parametrize("wrong", ["http://llm.example", "llm.example:8000", "*", "a b", "[::1]", ","])
def test_what_is_no_host_name_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name; write names without scheme and port"):
        ServeConfig(allowed_hosts=wrong)
