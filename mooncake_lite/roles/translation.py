"""Translation between messages and the control plane's events and orders, field by field.

Used by the conductor role, which adds what the control plane must not see (`held_requests.py`).
"""

from __future__ import annotations

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev


def rank_of(peer: str) -> int:
    """Return the rank of a peer's name; -1 for a gateway, the launcher or a command."""
    prefix, _, number = peer.partition("-")
    return int(number) if prefix == "rank" and number.isdecimal() else -1


def event_of(peer: str, message: m.Message) -> ev.Event | None:
    """Return the event for a message. None: the message does not concern the control plane."""
    rank = rank_of(peer)
    match message:
        case m.Cancel():
            return ev.RequestCancelled(message.request_id, message.branch)
        case m.Stop():
            return ev.StopRequested(message.reason, message.grace_s)
        case m.RankError():
            return ev.RankLost(rank, message.epoch, f"failed: {message.reason}")
        case m.RequestFailed(name, reason, writing, attempt, epoch):
            return ev.RequestFailed(rank, epoch, name, attempt, reason, writing)
        case m.DecodeLoaded():
            return ev.DecodeLoaded(
                rank, message.epoch, message.request_id, message.attempt, message.load_s,
                message.loaded_blocks,
            )  # fmt: skip
        case m.PromptComputed(name, computed, compute_s, attempt, epoch, load_s, blocks):
            return ev.PromptComputed(rank, epoch, name, attempt, computed, compute_s, load_s, blocks)
        case m.DecodeDone():
            return ev.DecodeEnded(
                rank, message.epoch, message.request_id, message.attempt, message.branch,
                message.answer_tokens, message.steps, message.sequences, message.context_tokens,
                message.steps_s,
            )  # fmt: skip
        case m.SwapWanted(name, num_tokens, keys, digests, attempt, epoch, branch):
            return ev.SwapWanted(rank, epoch, name, attempt, num_tokens, keys, digests, branch)
        case m.PutEnded(ids, sums, failed, may_still_write, epoch):
            return ev.PutsEnded(rank, epoch, ids, sums, failed, may_still_write)
        case m.PagesHeld():
            return ev.InstanceReport(rank, message.epoch, message.stored, message.removed)
        case m.TierIndex():
            return ev.TierIndexed(rank, message.epoch, message.keys, message.digests, message.last)
        case m.BlocksLoaded(number, ok, sums, seconds, problem, may_still_write, epoch):
            return ev.BlocksLoaded(rank, epoch, number, ok, sums, seconds, problem, may_still_write)
        case m.BlocksSaved():
            return ev.BlocksSaved(rank, message.epoch, message.keys, message.state)
        case m.TierEvicted():
            return ev.TierEvicted(rank, message.epoch, message.keys)
        case m.BlocksRemoved():
            return ev.BlocksRemoved(rank, message.epoch, message.keys, message.for_good)
        case m.BlocksCopied(number, sums, writing, epoch):
            return ev.BlocksCopied(rank, epoch, number, sums, writing)
        case m.BlocksChecked(number, good, problem, epoch):
            return ev.BlocksChecked(rank, epoch, number, good, problem)
    return None


def message_of(order: fx.Order) -> m.Message:
    """Return the message for an order that needs no data of the conductor."""
    match order:
        case fx.CancelOn():
            return m.Cancel(order.request_id, order.attempt, order.branch)
        case fx.ForgetPages():
            return m.ForgetPages()
        case fx.GrantPuts():
            return m.PutGranted(order.number, order.places)
        case fx.GrantSwap():
            return m.SwapGranted(order.request_id, order.attempt, order.branch, order.places)
        case fx.LoadBlocks():
            return m.LoadBlocks(order.number, order.keys, order.digests, order.refs)
        case fx.SaveBlocks():
            return m.SaveBlocks(order.refs, order.keys, order.digests, order.checksums)
        case fx.CopyBlocks():
            return m.CopyBlocks(order.number, order.sources, order.targets)
        case fx.RemoveBlocks():
            return m.RemoveBlocks(order.keys)
        case fx.CompactTier():
            return m.CompactTier()
    raise AssertionError(f"{type(order).__name__} is no order that stands for itself")
