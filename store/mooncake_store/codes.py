"""Return codes of the API, and the one error that carries them inside this package.

Used by all of it. The numbers are Mooncake's; 0 is success, a count or a size is not negative.
"""

from __future__ import annotations

from store.errors import StoreError

OK = 0
INTERNAL = -1
NO_SPACE = -200
BAD_PARAMETERS = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
HAS_LEASE = -706
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
NO_MASTER = -900
"""The master does not answer, or knows this client no longer."""
NO_TASK = -1400


class CodeError(StoreError):
    """An operation ended with this code. The text is for logs and for people."""

    def __init__(self, code: int, text: str):
        self.code = code
        super().__init__(f"{text} (code {code})")
