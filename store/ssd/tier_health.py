"""The present troubles of an SSD tier, in words.

The threads of the tier (`store.ssd.tier_writer`, `store.ssd.tier_reader`) note them here. Their owner asks
for them and tells the user. Knows no messages. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import threading

BAD_BLOCKS_S = 300.0
"""A tier counts as healthy again when it has found no bad block for this long."""

WRITES, BLOCKS = "writes", "blocks"

OVER = {
    WRITES: "the SSD tier can write again",
    BLOCKS: f"the SSD tier has found no bad block for {BAD_BLOCKS_S / 60:.0f} minutes",
}
"""kind -> the sentence that says that this trouble is over."""


class TierHealth:
    """The troubles of one tier. All methods may be called from any thread.

    Trouble with writes begins with the first block that cannot be written. It ends when a file is sealed that
    took a block after the last failure; the file that was open before says nothing about the disk.
    Trouble with blocks begins with the first bad block, and ends BAD_BLOCKS_S after the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        self._dropped = 0
        self._wrote_since = False
        self._bad = 0
        self._last_bad_at = 0.0

    def not_written(self, blocks: int, reason: str = "") -> None:
        """Note blocks that could not be written. reason: "" when the tier tried nothing after a failure."""
        with self._lock:
            self._dropped += blocks
            self._reason = reason or self._reason
            self._wrote_since = False

    def written(self) -> None:
        """Note a block that was written into the open file."""
        self._wrote_since = True

    def sealed(self) -> None:
        """Note that the open file was made durable."""
        with self._lock:
            if self._wrote_since:
                self._reason, self._dropped = "", 0

    def bad_block(self, now: float) -> None:
        """Note a block whose bytes are not those that were put."""
        with self._lock:
            self._bad += 1
            self._last_bad_at = now

    def troubles(self, now: float) -> dict[str, str]:
        """Return {kind: what is wrong}, without the kinds that are well."""
        with self._lock:
            if self._bad and now >= self._last_bad_at + BAD_BLOCKS_S:
                self._bad = 0
            found = {}
            if self._reason:
                dropped = f"{_blocks(self._dropped)} dropped"
                found[WRITES] = f"the SSD tier cannot write: {self._reason} ({dropped})"
            if self._bad:
                found[BLOCKS] = f"the SSD tier found {_blocks(self._bad, 'bad ')}; their KV is computed again"
            return found


def _blocks(count: int, kind: str = "") -> str:
    return f"{count} {kind}block{'' if count == 1 else 's'}"
