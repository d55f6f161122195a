"""Browser origins and host names: which pages may call a server, and by which names.

`serve.py` checks the flags, and `gateway/cross_origin.py` applies them. Browsers send the origin of a page
in the header `Origin`: scheme, host and port, in lower case, without a default port. In the header `Host`
they send the host and the port of the URL. See docs/reference/http.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_lite.errors import ConfigError

ANY = "*"
LOOPBACK = "loopback"

LOOPBACK_PATTERN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
"""Origins of pages that this machine serves, at any port."""

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")

_NAME = re.compile(r"[a-z0-9._-]+")

_HOST_HEADER = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]+)(?::[0-9]*)?")

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins that are allowed.

    every      all of them
    loopback   those that LOOPBACK_PATTERN matches
    named      these
    """

    every: bool = False
    loopback: bool = False
    named: tuple[str, ...] = ()

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may read answers."""
        if self.every or origin in self.named:
            return True
        return self.loopback and re.fullmatch(LOOPBACK_PATTERN, origin) is not None


def parse_origins(text: str) -> Origins:
    """Parse `--allowed-origins`: origins, "loopback" or "*", separated by commas; "" allows none.

    Raises ConfigError that names the first entry that is no origin.
    """
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    named = [_origin(entry) for entry in entries if entry not in (ANY, LOOPBACK)]
    return Origins(ANY in entries, LOOPBACK in entries, tuple(named))


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names by which clients may call a server.

    A page whose owner has pointed its name at this machine (DNS rebinding) calls the server by that name. IP
    addresses cannot be pointed elsewhere, and the machine's own names belong to it alone.

    names      in lower case
    checked    whether other names are refused
    """

    names: frozenset[str] = frozenset({"localhost"})
    checked: bool = True

    def knows(self, header: str) -> bool:
        """Return whether the header `Host` has an IP address or one of the names."""
        parts = _HOST_HEADER.fullmatch(header.lower())
        if parts is None:
            return False
        host = parts[1].rstrip(".")
        return host in self.names or _is_address(host.strip("[]"))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse `--allowed-hosts`: host names, separated by commas. Raises ConfigError for what is no name."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    for entry in entries:
        if not _NAME.fullmatch(entry.lower()):
            raise ConfigError(
                f"allowed_hosts: {entry!r} is not a host name; write names without scheme and port, "
                "as llm.example"
            )
    return tuple(entry.lower() for entry in entries)


def hosts_of(allowed: str, bound_to: str, own_names: Iterable[str]) -> Hosts:
    """Return the names of a server.

    allowed     --allowed-hosts
    bound_to    the address on which it listens
    own_names   of its machine
    """
    names = frozenset({"localhost", *(name.lower() for name in own_names), *parse_hosts(allowed)})
    return Hosts(names, bool(allowed.strip()) or ipaddress.ip_address(bound_to).is_loopback)


def _origin(entry: str) -> str:
    """Write an origin as browsers do."""
    parts = _ORIGIN.fullmatch(entry.lower())
    port = int(parts[3] or 0) if parts else 0
    if parts is None or port > 65535:
        raise ConfigError(
            f"allowed_origins: {entry!r} is not an origin; write scheme://host or scheme://host:port "
            f"without a path, {LOOPBACK}, or {ANY}"
        )
    scheme, host = parts[1], parts[2]
    return f"{scheme}://{host}" + (f":{port}" if port not in (0, _DEFAULT_PORTS.get(scheme)) else "")
