"""One model folder for all tests here, one live gateway that files share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from tests.mooncake_lite.gateway.fake_cluster import (
    LIMIT_S,
    FakeCluster,
    GatewayProcess,
    GatewayThread,
    make_model_folder,
)

if TYPE_CHECKING:
    import openai

Start = Callable[..., tuple[GatewayThread, FakeCluster]]
Spawn = Callable[..., tuple[GatewayProcess, FakeCluster]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: that of a Unix socket has at most 107 bytes, and pytest's own folders are deep."""
    with tempfile.TemporaryDirectory(prefix="ml-gw-") as folder:
        yield Path(folder)


@contextmanager
def starter(kind: type[Any], run_dir: Path, model_folder: Path) -> Iterator[Callable[..., Any]]:
    """Starts gateways of a kind, each with a cluster behind it; waits until they are ready."""
    with ExitStack() as stack:

        def begin(limits: dict[str, Any] | None = None, ready: bool = True, **config: Any) -> Any:
            cluster = FakeCluster(run_dir, config.pop("keys", None))
            cluster.status = config.pop("status", cluster.status)  # before the gateway asks
            stack.callback(cluster.close)
            gateway = kind(run_dir, config.pop("model_folder", model_folder), limits, **config)
            stack.callback(lambda: gateway.is_alive() and gateway.close())
            if ready:
                gateway.wait_ready()
            return gateway, cluster

        yield begin


@pytest.fixture
def start(run_dir: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Start]:
    """Starts a gateway of its own for a test, in a thread, which must have nothing to complain about."""
    with starter(GatewayThread, run_dir, model_folder) as begin:
        yield begin
    assert capsys.readouterr().err == ""


@pytest.fixture
def spawn(run_dir: Path, model_folder: Path) -> Iterator[Spawn]:
    """Starts a gateway of its own for a test, in a process."""
    with starter(GatewayProcess, run_dir, model_folder) as begin:
        yield begin


@pytest.fixture(scope="package")
def for_all(model_folder: Path) -> Iterator[tuple[GatewayProcess, FakeCluster]]:
    """One gateway for all files here, in a process, which must have nothing to complain about.

    Every scrape asks the conductor: an answer tells that all that was sent before has arrived.
    """
    with tempfile.TemporaryDirectory(prefix="ml-gw-") as folder:
        cluster = FakeCluster(Path(folder))
        gateway = GatewayProcess(Path(folder), model_folder, {"metrics_kept_s": 0.0})
        try:
            gateway.wait_ready()
            yield gateway, cluster
        finally:
            gateway.close()
            cluster.close()


@pytest.fixture(scope="module")
def shared(for_all: tuple[GatewayProcess, FakeCluster]) -> Iterator[tuple[GatewayProcess, FakeCluster]]:
    """The same; complaints are those of a file."""
    yield for_all
    for_all[0].check_quiet()


@pytest.fixture
def cluster(shared: tuple[GatewayProcess, FakeCluster]) -> FakeCluster:
    shared[1].forget()
    return shared[1]


@pytest.fixture
def gateway(shared: tuple[GatewayProcess, FakeCluster], cluster: FakeCluster) -> GatewayProcess:
    return shared[0]


@pytest.fixture
def http(gateway: GatewayProcess) -> httpx.Client:
    return gateway.http


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)
