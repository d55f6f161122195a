"""The launcher with dummy ranks, as a process of its own:  run_launcher.py PORT BEHAVIOUR [RANK]

For BEHAVIOUR "silent", RANK is instead the number of seconds after which the start is given up. The variable
TRACE names the trace of the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.launch import launcher

if __name__ == "__main__":
    behaviour, chosen = sys.argv[2], sys.argv[3] if sys.argv[3:] else ""
    command = [sys.executable, str(Path(__file__).with_name("dummy_rank.py")), *sys.argv[1:]]
    if behaviour == "stillborn":
        killed = f'[ "$OMPI_COMM_WORLD_RANK" = {chosen} ] && kill -9 $$; exec "$@"'
        command = ["sh", "-c", killed, "sh", *command]
    launcher.START_SLACK_S = 0.2  # dummies do not watch the limit themselves
    limit = float(chosen) if behaviour == "silent" and chosen else 60.0
    config = ServeConfig(port=int(sys.argv[1]), start_timeout_s=limit, trace=os.environ.get("TRACE", ""))
    try:
        sys.exit(launcher.Launcher(config, command=command).run())
    except (ClusterError, UserError) as error:
        print(f"mooncake-lite: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
