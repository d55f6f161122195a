"""Text to ids and back: nothing partial is shown, nothing is lost, and a template is only data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from mooncake_lite.errors import ModelError, RequestError
from mooncake_lite.model.chat_template import ChatTemplate
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from tests.mooncake_lite.model.conftest import byte_alphabet

pytestmark = pytest.mark.quick


def byte_level() -> Tokenizer:
    """256 bytes, a few merges and one control token, as GPT-2, Llama 3 and Qwen have them."""
    tokens = [*byte_alphabet(), "Ġt", "he", "Ġthe", "Ã©"]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©")]
    inner = Inner(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(inner, (260,), None, 261)


def byte_fallback() -> Tokenizer:
    """Words that begin with a blank, rare characters spelled in bytes: as Llama 2 and Mistral have them."""
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁the", "▁a", "cat", "s", "é", "▁▁"]
    inner = Inner(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Tokenizer(inner, (264,), None, 265)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
HARD = "naïve café, 你好, 👩‍👩‍👧, \ufffd, \u00e9\u0301"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(data=st.data())
def test_what_is_shown_piece_by_piece_is_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 264), max_size=40))
    detokenizer = tokenizer.detokenizer()

    shown = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.flush()

    assert shown == tokenizer.decode(ids)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(text=st.text(max_size=12))
def test_no_part_of_a_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text)]
    whole = tokenizer.decode(tokenizer.encode(text))

    assert "".join(pieces) + detokenizer.flush() == whole
    assert "".join(pieces).count("\ufffd") <= whole.count("\ufffd")
    assert whole.startswith("".join(pieces))


def test_a_character_of_many_tokens_is_shown_when_its_last_one_comes() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    ids = BYTE_LEVEL.encode("👩")

    assert len(ids) == 4
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "👩"]


def test_bytes_that_never_become_a_character_come_out_at_the_end() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()

    assert detokenizer.push(BYTE_LEVEL.encode("a👩")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_hard_text_survives_encoding_and_decoding() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(HARD)) == HARD


def test_a_control_token_is_shown_only_when_asked_for() -> None:
    ids = [*BYTE_LEVEL.encode("a"), 260]

    assert BYTE_LEVEL.decode(ids) == "a"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "a<|end|>"


# -------------------------------------------------------------------------------- chat templates


def render(source: str, **variables: Any) -> str:
    messages = [{"role": "user", "content": "Hi <b>"}]
    return ChatTemplate(source, {"bos_token": "<s>"}, "here").render(messages, **variables)


def test_templates_have_the_helpers_that_they_count_on() -> None:
    assert render("{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}") == "<s>user"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}c") == "ab<s>c"
    assert render("{% if tools %}with{% else %}without{% endif %} tools", tools=None) == "without tools"


def test_a_template_that_refuses_is_a_request_error_with_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must\nalternate') }}")

    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses this"):
        render(attack)


def test_a_template_that_python_refuses_to_compile_is_refused_too() -> None:
    with pytest.raises(ModelError, match=r"here: the chat template is not valid: 'break' outside loop"):
        ChatTemplate("{% break %}", {}, "here")


def test_a_template_that_is_not_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ModelError, match=r"here: the chat template is not valid: .*unknown tag 'fo'"):
        ChatTemplate("{% fo m in messages %}", {}, "here")


# --------------------------------------------------------------------------------- model folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = Inner(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.enable_truncation(1)
    inner.save(str(tmp_path / "tokenizer.json"))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config: dict[str, Any] = dict.fromkeys((*sizes, "head_dim", "max_position_embeddings"), 8)
    config |= {"model_type": "llama", "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_without_a_template_encodes_but_does_not_chat(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)

    assert tokenizer.encode("abab") == [0, 1, 0, 1]  # the truncation that tokenizer.json asks for is not ours
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.vocab_size == 8  # the rows of the embedding; the tokenizer has two
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "{{ eos_token }}!", "eos_token": {"content": "E"}}},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "{{ eos_token }}!"},
                ],
                "eos_token": "E",
            }
        },
        {"tokenizer_config.json": {"chat_template": "no"}, "chat_template.jinja": "{{ eos_token }}!"},
    ],
    ids=["text", "by name", "file"],
)
def test_a_template_is_found_wherever_folders_keep_it(files: dict[str, Any], folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "E"}))
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    assert load_tokenizer(folder).apply_chat_template([]) == "E!"


def test_damaged_tokenizer_files_are_refused(folder: Path, rewrite_json: Callable[..., None]) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match="chat_template must be a text, not int"):
        load_tokenizer(folder)
    rewrite_json(folder / "tokenizer.json", model=...)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)
