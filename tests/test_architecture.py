"""The house rules, checked over every import and every file: what style.md asks of a reader's patience."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mooncake_lite.labs.asking import JUDGES
from tests.python import python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "kernels_numba": set(),
    "transport": set(),
    "scheduler": set(),
    "store": {"transport", "kernels_numba"},
    "mooncake_lite": {"kernels_numba", "transport", "scheduler", "store"},
}
"""package -> which of ours it may import beside itself."""

SYSTEM: dict[str, set[str]] = {
    "config": set(),
    "control": {"config"},
    "messages": {"control"},
    "model": {"config"},
    "profiles": {"config", "model"},
    "tracing": set(),
    "workloads": {"config"},
    "launch": {"config", "messages", "model", "profiles", "tracing"},
    "engine": {"config", "launch", "messages", "model", "profiles"},
    "gateway": {"config", "launch", "messages", "model", "tracing"},
    "ranks": {"config", "control", "engine", "launch", "messages", "model", "profiles", "tracing"},
    "conductor": {"config", "control", "launch", "messages", "model", "profiles", "ranks", "tracing"},
    "planner": {"config", "engine", "profiles", "simulator", "workloads"},
    "simulator": {
        *("conductor", "config", "control", "engine", "messages", "model", "profiles", "ranks", "workloads"),
    },
    "labs": set(),
    "tools": {
        "conductor",
        "config",
        "control",
        "engine",
        "labs",
        "launch",
        "messages",
        "model",
        "planner",
        "profiles",
        "simulator",
        "workloads",
    },
}
"""Folder of mooncake_lite -> which of the others it may import, besides `errors` and the version. `cli`,
`serve_command` and `rank`, which stand above all folders, import what they start."""

ROOMS = {
    "mooncake_lite": SYSTEM,
    "kernels_numba": {
        "attention": {"arrays", "checks", "gpu", "intrinsics", "runtime"},
        "movers": {"arrays", "codecs", "gpu", "intrinsics", "runtime"},
        "layers": {
            *("arrays", "attention", "checks", "intrinsics", "matmul", "movers", "runtime"),
        },
        "report": {"attention", "checks", "codecs", "gpu", "movers"},
        "intrinsics": {"runtime"},
        "matmul": {"arrays", "intrinsics", "runtime"},
        "gpu": {"intrinsics"},
    },
    "store": {
        "policies": {"ranking"},
        "books": {"allocator", "layout", "objects", "policies", "ranking"},
        "ssd": {"layout"},
        "mooncake_store": {"allocator", "objects"},
        "mooncake_store.master": {
            *("mooncake_store", "allocator", "directory", "layout", "objects", "ranking"),
        },
    },
    "transport": {
        "messaging": {"wire"},
        "bulk": {"channel", "messaging", "threads", "wire", "world"},
    },
}
"""package -> folder -> what else of the package it may import besides `errors`: folders, and files that stand
beside them."""

WORLDS = "tests/worlds"
"""The fault world: product code but for its place, of as many parts as the simulator's."""

MOST_ENTRIES = 23
"""Of mooncake_lite itself: what a newcomer reads first."""

HEAVY = ("torch", "mpi4py", "numba", "transformers", "h5py")
LIGHT = {
    **dict.fromkeys(("store", "scheduler", "scheduler.instance", "transport"), ()),
    **dict.fromkeys(("mooncake_lite.gateway.__main__", "mooncake_lite.gateway.long_prompts_process"), ()),
    **dict.fromkeys(("mooncake_lite.launch.launcher", "mooncake_lite.launch.preflight"), ()),
    **dict.fromkeys(("mooncake_lite.conductor.__main__", "mooncake_lite.ranks.store.loop"), ("numpy",)),
}
"""What a module may load beside what is light, in the order in which one process imports them; the last one
opens files of the SSD tier."""

FILE_LINES = 450
FUNCTION_LINES = {"kernels_numba": 100}
FUNCTION_LINES_ELSEWHERE = 60
"""Statements and comments of a body; signature and docstring are free, for they are what is read first. A
kernel is one function by nature, the rest is not."""
CUDA_FUNCTION_LINES = 220
"""Of the *_cuda modules: Numba asks the driver which GPU to compile a device function for, so that parts of a
kernel cannot be functions of their own where it must lower without a GPU."""

PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
PICKLING_METHODS = {
    *("send", "recv", "isend", "irecv", "sendrecv", "bsend", "ssend", "issend", "mrecv", "mprobe"),
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"),
}
"""mpi4py's lower-case methods pickle what they are given; the upper-case ones move buffers."""


@pytest.fixture(scope="module", autouse=True)
def _without_garbage() -> Iterator[None]:
    """Trees are large and have no cycles: look for none among them meanwhile, and let them go at the end."""
    gc.disable()
    yield
    gc.enable()
    for kept in (parsed, sources, nodes, imported):
        kept.cache_clear()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def sources(*packages: str) -> list[tuple[Path, ast.Module]]:
    """(path, syntax tree) of every file of these packages."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [(path, parsed(path)) for path in paths]


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, LOOKED_AT))


@cache
def imported(tree: ast.Module) -> list[tuple[str, int]]:
    """(module, line) of every import, wherever it stands."""
    return list(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
        elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
            yield from ((str(a.value), node.lineno) for a in node.args[:1] if isinstance(a, ast.Constant))


def _last_name(function: ast.expr) -> str:
    """`c` of the call a.b.c()."""
    return getattr(function, "attr", getattr(function, "id", ""))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_arrows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path, tree in sources(package)
        for module, line in imported(tree)
        if module.split(".")[0] in MAY_IMPORT.keys() - {package} - MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_the_folders_of_a_package_import_one_way_too(package: str) -> None:
    rooms, found = ROOMS[package], defaultdict(set)
    for name, others in import_graph(package).items():
        found[_room(name, rooms)] |= {_room(other, rooms) for other in others}
    wrong = {room: found[room] - {room, "errors", "", *others} for room, others in rooms.items()}
    assert {room: others for room, others in wrong.items() if others} == {}
    arrows = {room: others - {room, ""} for room, others in found.items()}
    assert cycles({room: others & arrows.keys() for room, others in arrows.items()}) == []
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert {room.partition(".")[0] for room in rooms} == folders


def test_a_newcomer_finds_few_entries_in_the_system() -> None:
    assert len({path.name for path in (ROOT / "mooncake_lite").iterdir()} - {"__pycache__"}) <= MOST_ENTRIES


def _room(name: str, rooms: Collection[str]) -> str:
    """ "config" for mooncake_lite.config.modes, "" for mooncake_lite itself. Where `rooms` has a folder in a
    folder, that one is a room of its own."""
    inner = name.partition(".")[2]
    within = [room for room in rooms if f"{inner}.".startswith(f"{room}.")]
    return max(within, key=len, default=inner.partition(".")[0])


def test_every_package_has_files_to_check() -> None:
    assert all(len(sources(package)) > 3 for package in MAY_IMPORT)


def test_nobody_imports_upwards_with_dots_or_out_of_the_tests() -> None:
    wrong = []
    for path, tree in sources(*MAY_IMPORT):
        wrong += [f"{path}:{n.lineno}" for n in nodes(tree) if isinstance(n, ast.ImportFrom) and n.level > 1]
        wrong += [f"{path}:{line}" for module, line in imported(tree) if module.split(".")[0] == "tests"]
    assert wrong == []


CYCLES_ALLOWED: dict[frozenset[str], str] = {}
"""Modules that import each other -> why they must."""


def test_the_fault_world_imports_the_system_and_nothing_else_of_the_tests() -> None:
    assert len(sources(WORLDS)) > 3
    modules = {module for _, tree in sources(WORLDS) for module, _ in imported(tree)}
    ours = {module for module in modules if module.split(".")[0] == "tests"}
    assert {module for module in ours if not module.startswith("tests.worlds.")} == set()


def test_a_lab_is_made_of_the_system_alone() -> None:
    """`labs` copies these files into a release, which has no tests."""
    paths = sorted((ROOT / "tutorials/labs").glob("*/tests_*/data.py"))
    assert paths
    modules = {module for path in paths for module, _ in imported(parsed(path))}
    assert {module for module in modules if module.split(".")[0] == "tests"} == set()


def test_no_file_imports_itself_by_way_of_others() -> None:
    found = cycles(import_graph(*MAY_IMPORT, WORLDS))
    assert [sorted(cycle) for cycle in found if cycle not in CYCLES_ALLOWED] == []


def import_graph(*packages: str) -> dict[str, set[str]]:
    """module -> modules of ours that it imports: also inside functions, and for type checkers alone.

    `from package import module` counts as the module. That a module's import runs the `__init__` of its own
    packages does not count: those gather names for users.
    """
    trees = {module_name(path): (path, tree) for path, tree in sources(*packages)}
    return {
        name: set(_edges(name, path, tree, trees.keys())) - {name} for name, (path, tree) in trees.items()
    }


def module_name(path: Path) -> str:
    """ "store.keys" for store/keys.py, "store" for store/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _edges(name: str, path: Path, tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known:
                    yield target


def cycles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The sets of modules of which each can be reached from each other one."""
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [group for group in groups if group]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_the_search_for_cycles_finds_them() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}
    assert cycles(graph) == [frozenset({"b", "c"})]
    tree = ast.parse("def later():\n    from p import b\nif TYPE_CHECKING:\n    from . import c\nimport p.d")
    known = ["p", "p.a", "p.b", "p.c", "p.d"]
    assert sorted(_edges("p.a", Path("p/a.py"), tree, known)) == ["p.b", "p.c", "p.d"]


def test_every_thread_tells_of_its_death() -> None:
    """transport/threads.py starts them all; a threading.Timer is a thread too."""
    wrong = set()
    for path, tree in sources(*MAY_IMPORT):
        calls = (_last_name(node.func) for node in nodes(tree) if isinstance(node, ast.Call))
        if {*calls} & {"Thread", "Timer"}:
            wrong.add(str(path.relative_to(ROOT)))
    assert wrong == {"transport/threads.py"}


def test_a_light_module_loads_neither_torch_nor_mpi_nor_numba() -> None:
    heavy = {"numpy", *HEAVY}
    lines = [f"import {module}; print('{module}', *({heavy} & sys.modules.keys()))" for module in LIGHT]
    done = python("-c", "\n".join(["import sys", *lines]))
    expected = [" ".join((module, *allowed)) for module, allowed in LIGHT.items()]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, expected, "")


def test_nothing_is_pickled_on_a_wire_or_a_disk() -> None:
    wrong = []
    for path, tree in sources(*MAY_IMPORT):
        wrong += [f"{path}:{line} {name}" for name, line in imported(tree) if name.split(".")[0] in PICKLERS]
        wrong += [f"{path}:{line} {name}()" for name, line in _pickling_calls(tree)]
    assert wrong == []


def _pickling_calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Calls that pickle: pyzmq's *_pyobj anywhere, mpi4py's lower-case methods on a communicator."""
    for node in nodes(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, owner = node.func.attr, _last_name(node.func.value).lower()
        if name in ("send_pyobj", "recv_pyobj"):
            yield name, node.lineno
        elif name in PICKLING_METHODS and owner.strip("_") in ("comm", "world", "comm_world", "node"):
            yield f"{owner}.{name}", node.lineno


def test_the_search_for_pickling_calls_finds_them() -> None:
    tree = ast.parse("self._comm.bcast(x)\nMPI.COMM_WORLD.send(x, 1)\nsocket.send_pyobj(x)\nspoke.send(x)")
    assert [line for _, line in _pickling_calls(tree)] == [1, 2, 3]


def test_no_file_is_longer_than_a_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): _lines(path) for path, _ in sources(*MAY_IMPORT, WORLDS)}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_function_is_longer_than_a_screen() -> None:
    wrong = {}
    for package in (*MAY_IMPORT, WORLDS):
        usual = FUNCTION_LINES.get(package, FUNCTION_LINES_ELSEWHERE)
        for path, tree in sources(package):
            limit = CUDA_FUNCTION_LINES if path.stem.endswith("_cuda") else usual
            functions = [n for n in nodes(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found = {f"{path.relative_to(ROOT)}:{n.lineno} {n.name}": _body_lines(n) for n in functions}
            wrong.update({name: lines for name, lines in found.items() if lines > limit})
    assert wrong == {}


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0


def test_at_most_one_class_has_a_name_that_would_fit_many() -> None:
    """The others say which plan, answer, task or job they are: `ProfilePlan`, `BeatAnswer`."""
    trees = [tree for _, tree in sources(*MAY_IMPORT)]
    names = [node.name for tree in trees for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in ("Plan", "Answer", "Task", "Job") if names.count(name) > 1] == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path, tree in sources(*MAY_IMPORT, WORLDS)
        if not ast.get_docstring(tree)
    ]
    assert silent == []


def test_no_promise_is_left_in_the_code() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XXX")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path, _ in sources(*MAY_IMPORT)
        for word in words
        if word in path.read_text()
    ]
    assert found == []


def test_files_that_lists_name_are_there() -> None:
    """A list that names a file which has moved would say nothing, and do nothing."""
    constants = (n.value for n in ast.walk(parsed(ROOT / "tests/conftest.py")) if isinstance(n, ast.Constant))
    named = [text for text in constants if isinstance(text, str) and re.fullmatch(r"tests/\S+\.py", text)]
    assert len(named) > 10
    assert [name for name in (*named, *JUDGES) if not (ROOT / name).exists()] == []


def test_every_test_can_be_collected_by_name() -> None:
    """Two test files of one name in folders without __init__.py shadow each other."""
    missing = {
        str(path.parent.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert missing == set()
