"""Drive the control plane by hand: give it events, and print the effects that it wants carried out.

python examples/control_by_hand.py

`Control` does no I/O and reads no clock. The conductor of a live cluster feeds it what ranks and gateways
say; the simulator feeds it what models of them say. Here we play a prefill, a decode and a store rank.
"""

from collections.abc import Sequence

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.control.effects import StartPrefill
from store.keys import block_digests, prefix_keys

LAYOUT = (2, 1, 64, 8, 4, "none")
"""Of a tiny model: layers, KV heads, tokens per block, head dim, bytes per value, codec."""


def main() -> None:
    """Print the effects of a request's arrival, and of the end of its prefill."""
    control = Control(
        ControlConfig(layout=LAYOUT, roles=["steward", "prefill", "decode", "store"], nodes=[0] * 4)
    )
    control.on(ev.GatewayReady("gateway-0"), now=0.0)
    for rank, duty in enumerate(("prefill", "decode", "store"), start=1):
        segment = 2**20 if duty == "store" else 0
        control.on(ev.RankJoined(rank, 0, rank, (duty,), 0, slots=4, segment_bytes=segment), now=0.0)

    tokens = list(range(150))  # two full blocks of 64 tokens, and 22 tokens in a third
    keys, digests = prefix_keys(tokens, 64), block_digests(tokens, 64)
    arrived = ev.RequestArrived("request-1", len(tokens), 16, keys, digests)
    effects = show(control, arrived, now=1.0)

    order = next(effect for effect in effects if isinstance(effect, StartPrefill))
    checksums = [[0, 0] for _ in order.store]  # of each layer; a rank computes them
    ended = ev.PrefillEnded(order.rank, 0, "request-1", order.attempt, checksums, [], 0.0, 0.2, 0.01)
    show(control, ended, now=1.3)


def show(control: Control, event: ev.Event, now: float) -> Sequence[object]:
    """Apply an event, and print it with its effects."""
    print(f"at {now} s: {event}")
    effects = control.on(event, now)
    for effect in effects:
        print(f"    -> {effect}")
    return effects


if __name__ == "__main__":
    main()
