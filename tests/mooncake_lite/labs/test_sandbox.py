"""The sandbox: what a program sees in it, what it may use, and that nothing of it survives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mooncake_lite.labs import sandbox
from mooncake_lite.labs.asking import Child, Stopped
from mooncake_lite.labs.lab import Lab, labs_in
from mooncake_lite.labs.sandbox import MARK, Limits, problem, run
from mooncake_lite.launch.mpirun import COMMON, PROFILES
from tests.mooncake_lite.labs.trees import ROOT
from tests.mpi import find_mpirun
from tests.patience import patient

LIMITS = Limits(seconds=60, cpu_s=2, memory_mb=256, tasks=12)


@pytest.fixture(scope="module")
def possible() -> None:
    """Skip a test that needs a sandbox where none can be made."""
    if reason := problem():
        pytest.skip(reason)


needs_sandbox = pytest.mark.usefixtures("possible")


def python(tree: Path, program: str, limits: Limits = LIMITS) -> tuple[int, str, str]:
    ended = run([sys.executable, "-c", program], tree, limits)
    return ended.code, ended.output.strip(), ended.reason


@needs_sandbox
def test_a_program_sees_its_tree_and_can_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("inside")
    program = (
        "import os\n"
        "print(open('x').read(), os.getuid(), os.listdir('/tmp'), os.path.exists('/etc/shadow'))\n"
        "for path in ('/lab/y', '/usr/y', '/etc/passwd', '/y'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: print(error.errno)\n"
    )
    assert python(tmp_path, program) == (0, "inside 1000 [] False\n30\n30\n30\n30", "")


@needs_sandbox
def test_a_checkout_below_a_system_folder_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could lie in /usr/src. Here the checkout itself is taken for a folder of the system."""
    monkeypatch.setattr(sandbox, "_SYSTEM", (*sandbox._SYSTEM, str(ROOT)))
    program = (
        "import os\n"
        f"print([os.listdir('{ROOT}/' + name) for name in ('store', 'tests', 'tutorials')])\n"
        f"print(os.path.exists('{ROOT}/README.md'))"
    )
    assert python(tmp_path, program) == (0, "[[], [], []]\nTrue", "")


@needs_sandbox
def test_a_program_sees_no_process_and_no_network_but_itself(tmp_path: Path) -> None:
    program = (
        "import os, socket\n"
        "print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))\n"
        "print([name for _, name in socket.if_nameindex()])\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(bool(socket.create_connection(server.getsockname())))\n"
        "try: socket.create_connection(('192.0.2.1', 80), 1)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    assert python(tmp_path, program)[1].splitlines() == ["[1, 2]", "['lo']", "True", "Network is unreachable"]


@needs_sandbox
def test_a_program_has_no_capability_even_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    program = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.mount(b'none', b'/lab', None, 32 | 4096, None))\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('CapBnd')))\n"
        "libc.unshare(0x10000000 | 0x20000)\n"
        "print(libc.mount(b'none', b'/lab', None, 32 | 4096, None))\n"
    )
    assert python(tmp_path, program)[1].split() == ["-1", "CapBnd:", "0000000000000000", "-1"]


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "used more than 1 s of processor time"),
        ("import time\ntime.sleep(100)", "ran longer than 1 s"),
        ("import os\nwhile True: os.fork()", "started more than 12 processes and threads"),
        ("x = [b'x' * 10**8 for _ in range(100)]", "used more than 256 MB of memory"),
        ("while True: print('x' * 10_000)", "printed more than 1,048,576 bytes"),
    ],
    ids=["loop", "sleep", "fork", "memory", "print"],
)
def test_a_program_that_exceeds_a_limit_is_killed_and_the_limit_is_named(
    tmp_path: Path, program: str, says: str
) -> None:
    seconds = 1 if "sleep" in program else 60
    code, _, reason = python(tmp_path, program, Limits(seconds=seconds, cpu_s=1, memory_mb=256, tasks=12))
    assert code != 0
    assert reason == says


@pytest.mark.parametrize(
    "lab", [lab for lab in labs_in(ROOT).values() if lab.tasks], ids=lambda lab: f"lab{lab.number}"
)
def test_a_graded_child_loads_neither_torch_nor_mpi(lab: Lab) -> None:
    program = (
        "import sys\n"
        "from mooncake_lite.labs.child import load\n"
        f"assert load('{lab.folder}/drive.py')\n"
        "print({'torch', 'mpi4py'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@needs_sandbox
def test_a_daemon_dies_with_its_program(tmp_path: Path) -> None:
    began = time.monotonic()
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nos._exit(7)"
    assert python(tmp_path, program)[0] == 7
    assert time.monotonic() - began < patient(5)
    assert marked_now() == []


def test_without_namespaces_a_daemon_dies_too(tmp_path: Path) -> None:
    (tmp_path / "mooncake_lite").symlink_to(Path(__file__).parents[3] / "mooncake_lite")
    (tmp_path / "drive.py").write_text(
        "import os, time\n"
        "def leave(inputs):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(100)\n"
        "    return os.getpid()\n"
        "CALLS = {'leave': leave, 'exit': os._exit}\n"
    )
    child = Child(tmp_path, "drive.py", LIMITS, isolated=False)
    assert child.ask("leave", None, int) != os.getpid()
    with pytest.raises(Stopped, match="its process ended with exit code 3 before it answered"):
        child.ask("exit", 3, int)
    child.close()
    assert marked_now() == []


def marked_now() -> list[str]:
    """Processes of sandboxes that this test process has started: their folders say so."""
    wanted = f"{MARK}=".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = [word for word in path.read_bytes().split(b"\0") if word.startswith(wanted)]
        except OSError:
            continue
        if values and not os.path.exists(values[0].removeprefix(wanted)):
            found.append(path.parent.name)
    return found


HANGING = """
import sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
got = MPI.COMM_WORLD.allreduce(1)
print("ranks", got, flush=True)
if rank == 1:
    time.sleep(1000)
MPI.COMM_WORLD.Barrier()
"""


@needs_sandbox
def test_an_mpi_job_of_which_a_rank_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING)
    command = [find_mpirun(), "-n", "2", *COMMON, *PROFILES["ft"], sys.executable, "program.py"]
    env = {"OMP_NUM_THREADS": "1"}
    limits = Limits(seconds=patient(3), cpu_s=60, memory_mb=2048, tasks=80, shm_mb=256)
    ended = run(command, tmp_path, limits, env=env)
    assert ended.output.count("ranks 2") == 2
    assert "ran longer than" in ended.reason
    assert marked_now() == []
