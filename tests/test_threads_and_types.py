"""What threads decode has been read before: two threads that read a type at once crash the process.

msgspec 0.22 reads the annotations of a Struct when it is first decoded. A thread that comes while another one
reads them finds half of what it needs: the process dies of SIGSEGV. So modules whose functions threads call
read the types when they are imported.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tests.python import ROOT

PROGRAM = """
import msgspec._utils as utils
{imports}
def read(*given):
    raise SystemExit("a type is read too late")
utils._eval_type = read
{call}
"""

TENSOR = b"mlT1" + (9).to_bytes(4, "little") + msgspec.msgpack.encode(["uint8", [1]]) + b"\x01"
BODIES = "from mooncake_lite.gateway.bodies import *"
CASES = {
    "chat": (BODIES, """parse_chat(b'{"messages": [{"role": "user", "content": "hi"}]}')"""),
    "completion": (BODIES, """parse_completion(b'{"prompt": "hi", "stream_options": {}, "stream": true}')"""),
    "tokenize": (BODIES, """parse_tokenize(b'{"prompt": "hi"}')"""),
    "detokenize": (BODIES, """parse_detokenize(b'{"tokens": [1]}')"""),
    "hint": (BODIES, """parse_hint(b'{"verb": "pin", "session": "a"}')"""),
    "tensor": (
        "from store.mooncake_store.tensors import _decoded",
        f"assert list(_decoded({TENSOR!r})) == [1]",
    ),
    "region": (
        "from mooncake_lite.labs.tidy import untidy",
        r"assert untidy('def f():\n    import os\n', 'f')",
    ),
    "late": (
        "import msgspec; class A(msgspec.Struct): x: 'int'".replace("; ", "\n"),
        "msgspec.json.Decoder(A)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_type_is_read_when_threads_decode(name: str) -> None:
    imports, call = CASES[name]
    command = [sys.executable, "-c", PROGRAM.format(imports=imports, call=call)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ("a type is read too late\n" if name == "late" else "")
