"""The sampling that a model folder names for requests that do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.errors import ModelError
from mooncake_lite.model.generation_config import default_sampling

pytestmark = pytest.mark.quick


def test_what_the_model_names_is_taken_and_nothing_else(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}
    named = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("value", [50.0, -1.0, 0.0])
def test_a_number_without_a_fraction_is_an_integer_as_in_a_request(tmp_path: Path, value: float) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": value}))
    found = default_sampling(tmp_path)
    assert found == {"top_k": value}
    assert type(found["top_k"]) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "warm"), ("top_p", 0), ("top_k", 2.5), ("top_k", True)],
)
def test_a_value_that_no_request_may_have_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelError, match=f"generation_config.json: {name}={value!r} must be a number"):
        default_sampling(tmp_path)
