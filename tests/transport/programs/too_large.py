"""Rank 1 asks for more than there is: every rank gets the same error, and MPI ends in order."""

import pytest

from tests.patience import patient
from tests.transport.programs.harness import run
from transport.engine import TransferEngine
from transport.errors import SegmentError
from transport.world import World


def main() -> None:
    world = World.start(limit_s=20)
    with pytest.raises(SegmentError) as caught:
        TransferEngine(world, 2**50 if world.rank == 1 else 0)
    reasons = world.allgather_bytes(str(caught.value).encode())
    assert len(set(reasons)) == 1
    engine = TransferEngine(world, 4096 * world.rank)
    assert engine.sizes == [4096 * rank for rank in range(world.size)]
    engine.close()
    assert world.finish(patient(5))
    print(caught.value)


if __name__ == "__main__":
    run(main)
