"""One model folder for all tests here, one live gateway for each file that wants one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from tests.mooncake_lite.gateway.fake_cluster import LIMIT_S, FakeCluster, GatewayProcess, make_model_folder

Start = Callable[..., tuple[GatewayProcess, FakeCluster]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: that of a Unix socket has at most 107 bytes, and pytest's own folders are deep."""
    with tempfile.TemporaryDirectory(prefix="ml-gw-") as folder:
        yield Path(folder)


@pytest.fixture
def start(run_dir: Path, model_folder: Path) -> Iterator[Start]:
    """Starts a gateway of its own for a test, with the cluster behind it; waits until it is ready."""
    with ExitStack() as stack:

        def begin(
            limits: dict[str, Any] | None = None, ready: bool = True, **config: Any
        ) -> tuple[GatewayProcess, FakeCluster]:
            cluster = FakeCluster(run_dir, config.pop("keys", None))
            stack.callback(cluster.close)
            gateway = GatewayProcess(run_dir, config.pop("model_folder", model_folder), limits, **config)
            stack.callback(lambda: gateway.process.poll() is None and gateway.close())
            if ready:
                gateway.wait_ready()
            return gateway, cluster

        yield begin


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> Iterator[tuple[GatewayProcess, FakeCluster]]:
    """Every scrape asks the conductor: an answer tells that all that was sent before has arrived."""
    with tempfile.TemporaryDirectory(prefix="ml-gw-") as folder:
        cluster = FakeCluster(Path(folder))
        gateway = GatewayProcess(Path(folder), model_folder, {"metrics_kept_s": 0.0})
        try:
            gateway.wait_ready()
            yield gateway, cluster
        finally:
            gateway.close()
            cluster.close()


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
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)
