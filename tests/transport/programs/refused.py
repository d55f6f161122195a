"""Two nodes: a target refuses what its initiator should not have asked for; strangers do not get in.

The initiator's own check is passed by on purpose: a target trusts nobody.
"""

import numpy as np
import pytest

from tests.patience import patient, wait_until
from tests.transport.programs.harness import run
from transport.bulk.requests import MESSAGE_BYTES, Done, ReadRequest
from transport.channel import CurveKeys, Spoke
from transport.engine import Transfer, TransferEngine
from transport.errors import TransferRefused
from transport.wire import Decoder
from transport.world import World

LIMIT_S = 10.0


def main() -> None:
    world = World.start(limit_s=20)
    engine = TransferEngine(world, 2**20, stall_s=patient(2.0), path="two_sided")
    engine.local[:] = world.rank
    courier = engine._remote._courier
    card = f"{courier._hub.endpoints[0]} {courier._hub._curve.server_public}".encode()
    endpoint, key = world.allgather_bytes(card)[1].decode().split()
    world.barrier()
    buffer = np.full(64, 9, np.uint8)
    if world.rank == 0:
        engine.sizes[1] = 2**30
        for op in ("read", "write"):
            batch = engine.submit([Transfer(op, buffer, 1, 0, 2**20 - 1, 64)])
            with pytest.raises(
                TransferRefused, match=r"rank 1 refused: range 1048575[+]64 is outside the 1048576"
            ):
                batch.wait(5)
        assert (buffer == 9).all()
        with Spoke(
            endpoint, "0", Decoder(Done, MESSAGE_BYTES), CurveKeys.generate().for_server(key)
        ) as stranger:
            stranger.send(ReadRequest(1, 0, [0], [64]))
            world.barrier()  # counted
            assert stranger.receive(0.5) == []
        engine.submit([Transfer("read", buffer, 1, 0, 0, 64)]).wait(5)
        assert (buffer == 1).all()
    else:
        counted = wait_until(lambda: engine.control_counters["strangers"], LIMIT_S)
        assert counted, "the stranger was not counted"
        world.barrier()
    world.barrier()
    assert (engine.control_counters["strangers"] > 0) == (world.rank == 1)
    engine.close()
    assert world.finish(patient(5))
    print(f"rank {world.rank} ok")


if __name__ == "__main__":
    run(main)
