"""The tree of errors of the transport. Each message is one line and carries its numbers.

TransportError
  WireError              a message cannot be encoded or decoded
  ChannelError           an endpoint cannot be bound or connected
  WorldError             MPI cannot be started, or a collective did not end in its time
  SegmentError           the segments do not fit into this machine's memory or backing folder
  TransferError          one transfer of bytes failed
    BadTransfer          it can never work: unknown rank, range outside the segment, wrong buffer
    TransferRefused      the other side said no
    PeerLost             the other rank or process is dead
    TransferTimeout      no progress for the time allowed, or wait() ran out of its own
    TransferCancelled    the caller has cancelled its batch
    EngineClosed         the engine was closed first
  ExchangeError          the members of an exchange disagree, or use it wrongly
  MemberLost             a member of an exchange does not come any more, or the exchange was closed
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of all errors that this package raises on purpose."""


class WireError(TransportError):
    """A message is malformed, of an unknown version or type, or too large."""


class ChannelError(TransportError):
    """A channel cannot be opened at this endpoint."""


class WorldError(TransportError):
    """MPI is missing or broken, or a collective step did not end within its limit."""


class SegmentError(TransportError):
    """The requested segments do not fit. Raised on every rank with the same text."""


class TransferError(TransportError):
    """A transfer failed.

    rank        the other side, -1 when there is none
    may_land    of BytesClient.write alone: bytes had left, so the server may still put them in place
    """

    may_land = False

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank


class BadTransfer(TransferError):
    """A transfer that can never work, found before any byte moved."""


class TransferRefused(TransferError):
    """The target refused; the message carries its reason."""


class PeerLost(TransferError):
    """The other side is dead, for this reason: a rank, or a process known by its address.

    nobody_listens  its host answers, but no process has its port: so the network is not broken
    """

    def __init__(self, peer: int | str, reason: str):
        is_rank = isinstance(peer, int)
        super().__init__(f"rank {peer} is lost: {reason}" if is_rank else f"{peer} is lost: {reason}")
        self.rank = int(peer) if is_rank else -1
        self.reason = reason
        self.nobody_listens = False


class TransferTimeout(TransferError, TimeoutError):
    """A limit in time ran out."""


class TransferCancelled(TransferError):
    """The batch was cancelled before this transfer had ended."""


class EngineClosed(TransferError):
    """The engine was closed while, or before, this transfer was to run."""


class ExchangeError(TransportError):
    """The members of an exchange do not make the same exchanges, or one uses it wrongly."""


class MemberLost(TransportError):
    """A wait for the other members of an exchange was ended: by a limit, by lose(), or by close()."""


def why_over(rank: int, dead: str) -> TransferError:
    """Return the error of a transfer with this rank whose path is over. dead: why its thread died, or ""."""
    if dead:
        return TransferError(f"rank {rank}: {dead}", rank)
    return EngineClosed("the engine was closed", rank)
