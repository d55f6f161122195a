"""Tracing: what every process of a cluster did, on one time axis, for `serve --trace FILE`.

Each process writes its events to a part of its own, in a folder beside FILE (`tracer.py`, `lanes.py`). At the
end of the run the parts are joined (`merge.py`) into a file in Chrome's trace event format, for Perfetto.
It may not know what roles do; the files named `traced.py`, and `gateway/traced_view.py`, say what is traced.
Explained in docs/how-to/trace.md.
"""
