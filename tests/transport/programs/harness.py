"""How the programs of this folder end: with a traceback and os._exit, for MPI may wait after a failure."""

import os
import sys
import traceback
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """Run main(); whatever it raises ends this rank at once with exit code 1."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
