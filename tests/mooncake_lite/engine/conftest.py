"""A model of two layers for many answers, its oracle, and one thread to compute it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from mooncake_lite.engine.local import use_threads
from mooncake_lite.model.forward import Model, load_model
from tests.mooncake_lite.model.conftest import tiny_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A model that is this small computes longest when threads wait for each other."""
    before = numba.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


@pytest.fixture(scope="module")
def oracle_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_model("llama", folder, num_hidden_layers=2).double(), folder


@pytest.fixture(scope="module")
def model(oracle_and_folder: tuple[Any, Path], device: str) -> Model:
    return load_model(oracle_and_folder[1], device=device)
