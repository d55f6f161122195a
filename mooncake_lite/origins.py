"""Browser origins: which pages may read the answers of a server.

`config.py` checks the flag, and `gateway/cross_origin.py` applies it. Browsers send an origin in the header
`Origin`: scheme, host and port, in lower case, without a default port. See docs/reference/http.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mooncake_lite.errors import ConfigError

ANY = "*"
LOOPBACK = "loopback"

LOOPBACK_PATTERN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
"""Origins of pages that this machine serves, at any port."""

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")

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
