"""The sandbox: what a program sees in it, what it may use, and that nothing of it survives."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_lite.labs import sandbox, seccomp
from mooncake_lite.labs.asking import Child, Stopped
from mooncake_lite.labs.lab import Lab, labs_in
from mooncake_lite.labs.sandbox import MOST_TASKS, Confined, Limits, possible, run
from mooncake_lite.launch.mpirun import COMMON, PROFILES
from tests.mooncake_lite.labs.elsewhere import python_as
from tests.mooncake_lite.labs.trees import ROOT, sandboxed
from tests.mpi import find_mpirun
from tests.patience import patient, wait_until
from tests.python import printed_by

LIMITS = Limits(seconds=60, cpu_s=2, memory_mb=256, tasks=12)

ENDING_S = 1.0
"""In which a sandbox of another test, whose folder is gone already, has ended."""


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip a test that needs namespaces where none can be made."""
    level, why = possible()
    if level != "namespaces":
        pytest.skip(why)


needs_sandbox = pytest.mark.usefixtures("namespaces")


def python(tree: Path, program: str, limits: Limits = LIMITS, *, proc: bool = False) -> tuple[int, str, str]:
    ended = run([sys.executable, "-c", program], tree, limits, proc=proc)
    return ended.code, ended.output.strip(), ended.reason


def way_to_the_interpreter() -> dict[str, list[str]]:
    """{folder: all that it shows} for /tmp, and for the folders below it that lead to the interpreter."""
    shown: dict[str, set[str]] = {"/tmp": set()}
    for bound, _ in sandbox._packages():
        path = Path(bound)
        while path.is_relative_to("/tmp") and path != Path("/tmp"):
            shown.setdefault(str(path.parent), set()).add(path.name)
            path = path.parent
    return {folder: sorted(names) for folder, names in shown.items()}


@needs_sandbox
def test_a_program_sees_its_tree_and_can_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout may lie below /tmp. Of /tmp, the way to its virtual environment is all that is seen."""
    (tmp_path / "x").write_text("inside")
    (tmp_path / "x").chmod(0o600)
    tmp_path.chmod(0o700)
    with tempfile.TemporaryDirectory(dir="/tmp") as checkout:
        (Path(checkout) / "tests").mkdir()
        (Path(checkout) / ".venv").mkdir()
        bound = [*sandbox._packages(), (f"{checkout}/.venv",) * 2]
        monkeypatch.setattr(sandbox, "_packages", lambda: bound)
        way = way_to_the_interpreter()
        assert way[checkout] == [".venv"]
        program = (
            "import os\n"
            "print(open('x').read(), os.getuid(), os.path.exists('/etc/shadow'))\n"
            f"print({{folder: sorted(os.listdir(folder)) for folder in {list(way)}}})\n"
            "for path in ('/lab/y', '/usr/y', '/etc/passwd', '/y'):\n"
            "    try: open(path, 'w')\n"
            "    except OSError as error: print(error.errno)\n"
        )
        assert python(tmp_path, program) == (0, f"inside 1000 False\n{way}\n30\n30\n30\n30", "")


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
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_an_interpreter_may_lie_below_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    bound = sandbox._packages()
    with tempfile.TemporaryDirectory(dir=place) as folder:
        (Path(folder) / "library").mkdir(0o755)
        monkeypatch.setattr(sandbox, "_packages", lambda: [*bound, (f"{folder}/library",) * 2])
        program = (
            f"import os\nprint(os.listdir('{folder}'), os.access('{place}', os.W_OK))\n"
            f"try: open('{folder}/library/new', 'w')\nexcept OSError as error: print(error.strerror)"
        )
        assert python(tmp_path, program)[1] == "['library'] True\nRead-only file system"


ATTACKS = """
import ctypes, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, first, *others):
    result = libc.syscall(number, ctypes.c_long(first), *others, 0, 0, 0, 0)
    if result == 0 and os.getpid() != own:
        os._exit(0)  # what a clone has made
    return ctypes.get_errno() if result == -1 else 0
own = os.getpid()
print(json.dumps({name: call(*arguments) for name, arguments in json.loads(sys.argv[1]).items()}))
"""
COLUMN = seccomp.MACHINES[platform.machine()][1]
NEW_USERS, SIGCHLD = 0x10000000, 17
SYSTEM_CALLS = {
    **{name: (numbers[COLUMN], 0) for name, numbers in seccomp.REFUSED.items()},
    "a new user namespace": (seccomp.REFUSED["unshare"][COLUMN], NEW_USERS),
    "a clone with namespaces": (seccomp.CLONE[COLUMN], NEW_USERS | SIGCHLD),
    "clone3": (seccomp.CLONE3[COLUMN], 0),
    "the x32 ABI": (seccomp.X32 + 39, 0),
    "AF_VSOCK": (seccomp.SOCKET[COLUMN], 40, 1),
    "AF_PACKET": (seccomp.SOCKET[COLUMN], 17, 3),
    "AF_ALG": (seccomp.SOCKET[COLUMN], 38, 5),
    "a pair of AF_VSOCK": (seccomp.SOCKETPAIR[COLUMN], 40, 1),
    "a pair of AF_UNIX with no room for it": (seccomp.SOCKETPAIR[COLUMN], 1, 1),
}
ANSWERS = {
    **dict.fromkeys(("clone3", "the x32 ABI"), errno.ENOSYS),
    **dict.fromkeys(("AF_VSOCK", "AF_PACKET", "AF_ALG", "a pair of AF_VSOCK"), errno.EAFNOSUPPORT),
    "a pair of AF_UNIX with no room for it": errno.EFAULT,
}


@pytest.fixture(scope="module")
def answers(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """{attack: error number of the kernel} inside a sandbox."""
    command = [sys.executable, "-c", ATTACKS, json.dumps(SYSTEM_CALLS)]
    answers: dict[str, int] = json.loads(run(command, tmp_path_factory.mktemp("tree"), LIMITS).output)
    return answers


@pytest.mark.parametrize("attack", SYSTEM_CALLS)
def test_the_kernel_refuses_what_leaves_a_sandbox(answers: dict[str, int], attack: str) -> None:
    assert errno.errorcode[answers[attack]] == errno.errorcode[ANSWERS.get(attack, errno.EPERM)]


SYSCTL = "/proc/sys/kernel/core_pattern"


@needs_sandbox
def test_there_is_no_proc_unless_it_is_asked_for_and_then_of_processes_alone(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))\n"
        "print(os.path.exists('/proc/sys'))\n"
        "print(next(line for line in open('/proc/self/status') if 'CapBnd' in line))"
    )
    assert python(tmp_path, "import os; print(os.path.exists('/proc'))")[1] == "False"
    assert python(tmp_path, program, proc=True)[1].split() == ["[1,", "2]", "False", "CapBnd:", "0" * 16]
    for proc in (False, True):
        assert "No such file" in python(tmp_path, f"open({SYSCTL!r}, 'r+')", proc=proc)[1]


@needs_sandbox
def test_outside_a_program_of_root_is_a_user_that_owns_nothing_and_can_make_no_namespace(
    tmp_path: Path,
) -> None:
    with Confined([sys.executable, "-c", "input()"], tmp_path, LIMITS, level="namespaces") as running:
        first = running.first
        children = Path(f"/proc/{first}/task/{first}/children")
        while not (inside := children.read_text().split()):
            assert running.process.poll() is None
        for pid in (first, int(inside[0])):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            ids = {word for line in lines if line[:4] in ("Uid:", "Gid:") for word in line.split()[1:]}
            assert ids == {str(os.geteuid())} if os.geteuid() else min(map(int, ids)) >= 20_000
            if not os.geteuid():
                assert [line.split()[1:] for line in lines if line.startswith("Groups")] == [[]]
        enter = ["nsenter", "--user", "--preserve-credentials", "--target", str(first)]
        if shutil.which("nsenter"):
            limit = subprocess.run(
                [*enter, "cat", "/proc/sys/user/max_user_namespaces"], capture_output=True, check=True
            )
            assert limit.stdout == b"0\n"


def test_a_user_whose_proc_is_masked_gets_a_sandbox() -> None:
    program = (
        "import os\nfrom mooncake_lite.labs.sandbox import possible\nprint(os.getuid() > 0, *possible())"
    )
    assert python_as("user", program) == "True namespaces \n"


LEAVING = """
import os, socket, sys, time
secret, place = sys.argv[1:]
def tried(action, *arguments):
    try: return action(*arguments)
    except OSError as error: return error.strerror
print(tried(os.listdir, "."), tried(open, secret), tried(os.listdir, "/proc/1/fd"))
print(tried(socket.socket), oct(os.stat(".").st_mode), os.listdir(os.environ["HOME"]))
for folder in (place, os.environ["HOME"], "/dev/shm"):
    os.mkdir(f"{folder}/left-{os.getuid()}")
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
print(os.getuid(), os.getgid(), os.getgroups())
"""
CONTAINER = """
import os, sys, tempfile
from pathlib import Path
from mooncake_lite.labs.sandbox import Limits, possible, run
print(*possible())
limits = Limits(seconds=60, cpu_s=2, memory_mb=256, tasks=12)
with tempfile.TemporaryDirectory() as folder:
    tree, secret = Path(folder) / "tree", Path(folder) / "seed"
    tree.mkdir(0o700)
    secret.write_text("42")
    (tree / "x").touch(0o600)
    command = [sys.executable, "-c", sys.argv[1], str(secret), tempfile.gettempdir()]
    print(run(command, tree, limits, level="uid").output.strip())
"""


def test_root_without_namespaces_runs_a_program_as_a_user_that_reads_its_tree_alone() -> None:
    """And no process and no file of it stays behind."""
    level, seen, network, who = python_as("container", CONTAINER, LEAVING).splitlines()
    user, group, groups = who.split()
    assert level == "uid namespaces: unshare: Operation not permitted"
    assert seen == "['x'] Permission denied Permission denied"
    assert network == "Address family not supported by protocol 0o40700 []"
    assert (group, groups) == (user, "[]")
    assert int(user) > 0
    owners = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            owners.add(path.stat().st_uid)
    assert int(user) not in owners
    left = [path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob(f"left-{user}")]
    assert left == []


@needs_sandbox
def test_a_program_sees_no_network_but_itself(tmp_path: Path) -> None:
    program = (
        "import os, socket\n"
        "print([name for _, name in socket.if_nameindex()])\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(bool(socket.create_connection(server.getsockname())))\n"
        "try: socket.create_connection(('192.0.2.1', 80), 1)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    assert python(tmp_path, program)[1].splitlines() == ["['lo']", "True", "Network is unreachable"]


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


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program a user of its own")
def test_the_kernel_bounds_the_processes_of_a_program_that_outruns_the_samples(tmp_path: Path) -> None:
    program = "import resource\nprint(*resource.getrlimit(resource.RLIMIT_NPROC))"
    assert python(tmp_path, program)[1].split() == [str(MOST_TASKS)] * 2


def test_the_limit_of_seconds_begins_anew_with_each_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = time.monotonic() + 2 * LIMITS.seconds
    with Confined([sys.executable, "-c", "input()"], tmp_path, LIMITS, level="none") as program:
        monkeypatch.setattr(sandbox.time, "monotonic", lambda: late)
        assert program.over() == "ran longer than 60 s"
        program.restart_clock()
        assert program.over() == ""
        monkeypatch.undo()


@pytest.mark.parametrize(
    "lab", [lab for lab in labs_in(ROOT).values() if lab.files], ids=lambda lab: f"lab{lab.number}"
)
def test_a_graded_child_loads_neither_torch_nor_mpi(lab: Lab) -> None:
    program = (
        "import sys\n"
        "from mooncake_lite.labs.child import load\n"
        f"assert load('{lab.folder}/drive.py')\n"
        "print({'torch', 'mpi4py'} & set(sys.modules))"
    )
    assert printed_by("-c", program) == "set()\n"


@needs_sandbox
def test_a_daemon_dies_with_its_program(tmp_path: Path) -> None:
    began = time.monotonic()
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nos._exit(7)"
    assert python(tmp_path, program)[0] == 7
    assert time.monotonic() - began < patient(5)
    assert wait_until(lambda: marked_now() == [], patient(ENDING_S))


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
    child = Child(tmp_path, "drive.py", LIMITS, level="none")
    assert child.ask("leave", None, int) != os.getpid()
    with pytest.raises(Stopped, match="its process ended with exit code 3 before it answered"):
        child.ask("exit", 3, int)
    child.close()
    assert wait_until(lambda: marked_now() == [], patient(ENDING_S))


def marked_now() -> list[str]:
    """Processes of sandboxes whose folders are gone."""
    return [pid for pid, folder in sandboxed().items() if not os.path.exists(folder)]


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
    limits = Limits(seconds=60, cpu_s=60, memory_mb=2048, tasks=80, shm_mb=256)
    with Confined(command, tmp_path, limits, level="namespaces", proc=True, env=env) as running:
        assert running.process.stdout is not None
        told = (line for line in running.process.stdout if line == b"ranks 2\n")
        assert len(list(itertools.islice(told, 2))) == 2
        running.limits = replace(limits, seconds=0.1)
        while not (reason := running.over()):
            assert running.process.poll() is None
    assert reason == "ran longer than 0.1 s"
    assert wait_until(lambda: marked_now() == [], patient(ENDING_S))
