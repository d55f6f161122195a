"""`python -m mooncake_lite` is the same command as `mooncake-lite`; every rank is started this way."""

from __future__ import annotations

import sys

from mooncake_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
