"""A model folder that cannot be served is refused in one line, before a process or a run folder is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.cli import main
from mooncake_lite.config.machine import Machine
from mooncake_lite.launch import launcher, preflight
from mooncake_lite.launch.serve_child import free_port
from tests import emulation
from tests.mooncake_lite.launch.test_preflight import ROOMY
from tests.mooncake_lite.model.sound_folder import (
    add_token,
    edit_tokenizer,
    move_token,
    rewrite,
    sound_folder,
    tokens_of,
    write_weights,
)

pytestmark = pytest.mark.quick

Serve = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sound_folder(tmp_path / "model")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What would have been launched; run folders would lie in an empty folder of the test's own."""
    reached: list[Any] = []

    class Reached:
        def __init__(self, config: Any) -> None:
            reached.append(config)

        def run(self) -> int:
            return 0

    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(launcher, "Launcher", Reached)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: ROOMY))
    monkeypatch.setattr(preflight, "check_mpi_profile", lambda config: None)  # it asks Open MPI, for 60 ms
    return reached


@pytest.fixture
def serve(launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Serve:
    """Serve a folder; the exit code, and what was written to stderr."""

    def call(folder: Path, *flags: str) -> tuple[int, str]:
        code = main(["serve", str(folder), "--port", str(free_port()), *flags])
        assert (code == 0) == (len(launched) == 1)
        assert list((tmp_path / "runs").iterdir()) == []
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return call


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def named(name: str, **changes: Any) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, name, **changes)


def gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def template_with_a_token_of_its_own(folder: Path) -> None:
    add_token(folder)
    text("chat_template.jinja", "<|tool|>{% for m in messages %}{{ m.content }}{% endfor %}")(folder)


def bos_beyond(folder: Path) -> None:
    begin = {"id": "<|start|>", "ids": [4000], "tokens": ["<|start|>"]}
    single = [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    step = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [],
        "special_tokens": {"<|start|>": begin},
    }
    edit_tokenizer(folder, lambda description: description.update(post_processor=step))


def one_row_less(folder: Path) -> None:
    rewrite(folder, "config.json", vocab_size=tokens_of(folder) - 1)
    write_weights(folder)


def no_vocabulary(folder: Path) -> None:
    model: dict[str, Any] = {"type": "BPE", "vocab": {}, "merges": []}
    edit_tokenizer(folder, lambda description: description.update(added_tokens=[], model=model))


def end_token_in_config(folder: Path) -> None:
    (folder / GENERATION).unlink()
    rewrite(folder, CONFIG, eos_token_id=9999)


CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
SETTINGS, SPECIAL, JINJA = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


def bos_undefined(folder: Path) -> None:
    """The library panics over such a file, and not before it reads the first text."""
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    step = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    edit_tokenizer(folder, lambda description: description.update(post_processor=step))


REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "tokenizer missing": (gone(TOKENIZER), TOKENIZER, "save it with a fast tokenizer"),
    "tokenizer empty": (text(TOKENIZER, ""), TOKENIZER, "cannot be read"),
    "tokenizer cut": (text(TOKENIZER, '{"version": "1.0", "model": {'), TOKENIZER, "cannot be read"),
    "tokenizer of nothing": (text(TOKENIZER, "{}"), TOKENIZER, "Model missing"),
    "tokenizer a list": (text(TOKENIZER, "[1, 2]"), TOKENIZER, "cannot be read"),
    "tokenizer without tokens": (no_vocabulary, TOKENIZER, "has no tokens"),
    "an ordinary token beyond": (lambda f: move_token(f, "the", 5000), TOKENIZER, "vocab has ids up to 5000"),
    "the embedding a row short": (one_row_less, TOKENIZER, "vocab_size="),
    "BOS beyond": (bos_beyond, TOKENIZER, "post_processor: the text has the token None, and its id 4000"),
    "BOS undefined": (bos_undefined, TOKENIZER, "post_processor: the tokenizer cannot read this text"),
    "a template's token beyond": (
        template_with_a_token_of_its_own,
        *(TOKENIZER, "chat template: the text has the token '<|tool|>', and its id"),
    ),
    "template no Jinja": (text(JINJA, "{% for m in messages %}"), JINJA, "is not valid"),
    "template not to be compiled": (text(JINJA, "{% break %}"), JINJA, "is not valid"),
    "template in the settings": (named(SETTINGS, chat_template="{{ "), SETTINGS, "is not valid"),
    "template no text": (named(SETTINGS, chat_template=7), SETTINGS, "chat_template must be a text, not int"),
    "template in a dict": (named(SETTINGS, chat_template={}), SETTINGS, "chat_template must be a text"),
    "settings damaged": (text(SETTINGS, '{"chat_template'), SETTINGS, "is not JSON"),
    "settings a list": (text(SETTINGS, "[]"), SETTINGS, "must hold a JSON object, not list"),
    "special tokens damaged": (text(SPECIAL, "<s>"), SPECIAL, "is not JSON"),
    "generation damaged": (text(GENERATION, "{'top_k': 1}"), GENERATION, "is not JSON"),
    "generation too deep": (text(GENERATION, "[" * 100_000), GENERATION, "is not JSON"),
    "generation a list": (text(GENERATION, "[]"), GENERATION, "must hold a JSON object, not list"),
    "generation null": (text(GENERATION, "null"), GENERATION, "must hold a JSON object"),
    "top_p a text": (named(GENERATION, top_p="all"), GENERATION, "top_p='all' must be a number above 0"),
    "top_k too low": (named(GENERATION, top_k=-2), GENERATION, "top_k=-2 must be a number from -1 to"),
    "temperature too high": (named(GENERATION, temperature=99), GENERATION, "from 0 to 2"),
    "a tiny penalty": (named(GENERATION, repetition_penalty=1e-38), GENERATION, "from 1e-06 to 10"),
    "no number": (named(GENERATION, min_p=float("nan")), GENERATION, "min_p=nan must be a number"),
    "an end token beyond": (named(GENERATION, eos_token_id=9999), GENERATION, "9999 must be a token id"),
    "one of two beyond": (named(GENERATION, eos_token_id=[1, 9999]), GENERATION, "eos_token_id=[1, 9999]"),
    "end token negative": (named(GENERATION, eos_token_id=-1), GENERATION, "eos_token_id=-1"),
    "end token a text": (named(GENERATION, eos_token_id="</s>"), GENERATION, "eos_token_id='</s>'"),
    "config names it": (
        end_token_in_config,
        *(CONFIG, "eos_token_id=9999 must be a token id or a list of them, from 0 to"),
    ),
    "config damaged": (text(CONFIG, "{"), CONFIG, "is not JSON"),
    "a family of no kind": (named(CONFIG, model_type=[]), CONFIG, "model_type [] is not supported"),
    "architectures no list": (named(CONFIG, architectures=3), CONFIG, "architectures 3"),
    "an infinite number": (named(CONFIG, rms_norm_eps=float("inf")), CONFIG, "rms_norm_eps=inf"),
}  # fmt: skip
"""kind -> (what is done to a sound folder, the file that is named, words of the line)."""

OF_WEIGHTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "weights missing": (gone("model.safetensors"), "model.safetensors", "has no"),
    "weights cut": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        *("model.safetensors", "cannot be read"),
    ),
    "weights no weights": (text("model.safetensors", "x" * 99), "model.safetensors", "cannot be read"),
    "more rows than are there": (
        named(CONFIG, vocab_size=5000),
        *("model.safetensors", "config.json asks for (5000, 16) (vocab_size, hidden_size)"),
    ),
    "layers that are not there": (named(CONFIG, num_hidden_layers=2), "", "9 tensors are missing"),
}
"""The same, where the engine needs weights."""


@pytest.mark.parametrize("kind", [*REFUSED, *OF_WEIGHTS])
def test_a_folder_that_cannot_work_is_refused_in_a_line_with_file_and_key(
    kind: str, folder: Path, serve: Serve
) -> None:
    damage, name, words = (REFUSED | OF_WEIGHTS)[kind]
    damage(folder)
    code, said = serve(folder)
    assert code == 2
    assert said.startswith("mooncake-lite: error: ")
    assert said.count("\n") == 1
    assert str(folder) in said
    assert name in said
    assert words in said


@pytest.mark.parametrize("kind", sorted(REFUSED.keys() - {"the embedding a row short"}))  # another profile's
def test_an_emulated_engine_is_refused_the_same_folders(kind: str, folder: Path, serve: Serve) -> None:
    profile = emulation.profile_file(folder)
    REFUSED[kind][0](folder)
    (folder / "model.safetensors").unlink(missing_ok=True)
    code, said = serve(folder, "--engine", "emulated", "--profile", str(profile))
    assert (code, said.count("\n")) == (2, 1)
    assert REFUSED[kind][1] in said


def holes(folder: Path) -> None:
    """An ordinary token stands behind a gap of ids, in an embedding that has all of them."""
    last = tokens_of(folder) + 40
    edit_tokenizer(folder, lambda parsed: parsed["model"]["vocab"].update({"<|late|>": last}))
    rewrite(folder, CONFIG, vocab_size=last + 1)
    write_weights(folder)


def padded(folder: Path) -> None:
    rewrite(folder, CONFIG, vocab_size=tokens_of(folder) + 25)
    write_weights(folder)


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    text("model.safetensors.index.json", '{"weight_map": {"a": "one.safetensors"}}')(folder)


def only_what_is_needed(folder: Path) -> None:
    for name in (GENERATION, SETTINGS, SPECIAL):
        (folder / name).unlink()


SOUND: dict[str, Callable[[Path], object]] = {
    "as it is": lambda folder: None,
    "only what is needed": only_what_is_needed,
    "rows to pad the embedding": padded,
    "holes in the ids": holes,
    "in shards": sharded,
    "nulls": named(GENERATION, temperature=None, top_k=None, eos_token_id=None, bos_token_id=None),
    "end tokens in a list": named(GENERATION, eos_token_id=[0, 1, 1]),
    "switched off as a request may": named(GENERATION, top_k=-1, min_p=0, repetition_penalty=1),
    "as small as a request may": named(GENERATION, top_p=1e-9, temperature=0.0),
    "a pad that is not used": named(CONFIG, pad_token_id=-1, bos_token_id=99_999),
    "no pad": named(CONFIG, pad_token_id=None, eos_token_id=None),
    "an end token that is overruled": named(CONFIG, eos_token_id=99_999),
    "several templates": named(SETTINGS, chat_template=[{"name": "default", "template": "a"}, {"name": []}]),
    "a template that refuses": named(SETTINGS, chat_template="{{ raise_exception('no') }}"),
    "special tokens as they come": named(SETTINGS, bos_token=None, additional_special_tokens=["<|x|>"]),
}


@pytest.mark.parametrize("kind", SOUND)
def test_what_can_work_is_started_without_a_word(kind: str, folder: Path, serve: Serve) -> None:
    SOUND[kind](folder)
    assert serve(folder) == (0, "")


def test_an_added_token_that_only_the_tokenizer_has_gets_a_warning(folder: Path, serve: Serve) -> None:
    first = add_token(folder)
    add_token(folder, "<|image|>")
    code, said = serve(folder)
    assert (code, said.count("\n")) == (0, 1)
    assert said.startswith(f"mooncake-lite: warning: {folder}/tokenizer.json: added_tokens has 2 tokens")
    assert f"'<|tool|>' with the id {first} (vocab_size={first} in config.json)" in said


def test_under_ones_own_mpirun_rank_0_refuses_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from mooncake_lite.config.serve import ServeConfig
    from mooncake_lite.errors import ModelError
    from mooncake_lite.launch.run_dir import ENVIRONMENT
    from mooncake_lite.ranks.steward import assemble
    from transport.messaging.curve import CurveKeys

    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(assemble, "Child", lambda *_: pytest.fail("the gateway was made"))
    (folder / TOKENIZER).unlink()
    process: Any = SimpleNamespace(config=ServeConfig(model=str(folder), port=free_port()))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        assemble._before_mpi(process, CurveKeys.generate())
