"""Runs the Python blocks of one page, in one namespace, with the line numbers of the page.

A script of its own, started by `processes.PythonWorker`: `python_worker.py PAGE RESULT_FD`. Each line of
its standard input is a block as JSON, each line of RESULT_FD its result. Standard library only.
"""

import contextlib
import io
import json
import os
import sys
import traceback


def run(source: str, line: int, page: str, namespace: dict) -> dict:
    """Execute one block; its output, and the traceback if it raised."""
    printed = io.StringIO()
    error = None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile("\n" * (line - 1) + source, page, "exec"), namespace)
        except BaseException:
            error = traceback.format_exc()
    return {"output": printed.getvalue(), "error": error}


def main() -> None:
    page, results = sys.argv[1], os.fdopen(int(sys.argv[2]), "w")
    namespace = {"__name__": "__main__"}
    for request in sys.stdin:
        block = json.loads(request)
        results.write(json.dumps(run(block["source"], block["line"], page, namespace)) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
