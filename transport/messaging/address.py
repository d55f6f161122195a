"""The address at which other hosts reach this one.

Used by `engine`, and by the roles for the control channel beyond one host. Sends nothing: connecting a UDP
socket only reads the routing table. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from transport.errors import ChannelError

_ANYWHERE = "192.0.2.1"
"""A documentation address (RFC 5737), so that its route is the default route."""

_DISCARD_PORT = 9


def tcp_endpoint(address: str, port: int | str) -> str:
    """ "tcp://ADDRESS:PORT", with brackets around an IPv6 address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def reserved_port(address: str) -> socket.socket:
    """Return a bound socket whose port no stranger gets. One hub after the other of this user may bind it.

    It never listens: with SO_REUSEADDR on all of them, Linux lets one other socket listen there.
    """
    kept = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((address, 0))
    return kept


def address_of(host: str, port: int | None = None) -> str:
    """Return the address of a host, an IPv4 one if it has any: "localhost" may come as ::1 first.

    Raises OSError, ValueError or OverflowError for a host without an address, or an invalid port.
    """
    found = socket.getaddrinfo(host.strip("[]") or "?", port, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def address_towards(host: str) -> str | None:
    """Return the source address of packets to `host`; None if it is unreachable, unknown, or this host."""
    try:
        candidates = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if _serves_others(found):
            return found
    return None


def _serves_others(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)


def reachable_address(hosts: Iterable[str], override: str = "") -> str:
    """Return the address at which `hosts` reach this one; `override`, when given, is returned unchecked.

    Raises ChannelError when this host has only loopback addresses.
    """
    if override:
        return override
    for host in [*hosts, _ANYWHERE]:
        found = address_towards(host)
        if found is not None:
            return found
    raise ChannelError("no address other hosts could reach this one at was found; name one (--control-host)")
