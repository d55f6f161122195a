"""How the programs of this folder end: with their traceback and os._exit, since after a failure MPI may wait."""

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
