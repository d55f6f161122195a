"""Prompts of chats are those of transformers: templates of many models, messages of many shapes, folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.bodies import parse_chat, parse_tokenize
from mooncake_lite.model.chat_template import ChatTemplate
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from tests.mooncake_lite.model.conftest import byte_alphabet

pytestmark = pytest.mark.quick

Messages = list[dict[str, Any]]

REFUSES = "the model's chat template refuses this: "
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}

SECTIONS = re.split(
    r"^==== (.+) \| (text|parts)\n", (Path(__file__).parent / "chat_templates.txt").read_text(), flags=re.M
)
TEMPLATES = {name: (form, source.rstrip("\n")) for name, form, source in zip(*[iter(SECTIONS[1:])] * 3)}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(name: str, arguments: Any, call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "abcdefghi", **fields}


WEATHER = call("weather", {"town": "Zürich", "days": 2, "exact": True, "unit": None})
CHATS: dict[str, Messages] = {
    "one": [user("Hello")],
    "system": [system("Be brief."), user("Hello")],
    "three turns": [user(" Hello \n"), assistant("Hi.\n\n"), user("\tGo on.")],
    "all roles": [system(" Be brief.\n"), user("1"), assistant("2"), user("3"), assistant("4"), user("5?")],
    "two users": [user("Hello"), user("again")],
    "assistant first": [assistant("Hi, I am here."), user("Who?")],
    "assistant last": [user("Hello"), assistant("Well, ")],
    "system late": [user("Hello"), system("Be brief."), user("again")],
    "system alone": [system("Be brief. /think")],
    "unicode": [
        system("Sei höflich 🙂"),
        user("日本語\u00a0e\u0301 \u2028 \ufeff"),
        assistant("Ça va <|im_end|></s>"),
        user("\U0001f469\u200d\U0001f680"),
    ],
    "markup": [
        user("<b>&amp; 'x' \"y\" \\n {{ messages }} {% raw %} </think>"),
        assistant("a\r\nb\r\n\r\nc"),
        user("###"),
    ],
    "empty": [system(""), user(""), assistant(""), user(" ")],
    "no content": [user("Hello"), assistant(None), user("again")],
    "tool call": [user("Weather?"), assistant(None, tool_calls=[WEATHER]), tool('{"a": "ä > b"}', name="w")],
    "two calls": [
        system("Use tools."),
        user("Weather?"),
        assistant("I look.", tool_calls=[WEATHER, call("time", {}, "123456789")]),
        tool("sunny"),
        tool("12:30", tool_call_id="123456789"),
        assistant("Sunny, at 12:30.", tool_calls=None),
        user("Thanks"),
    ],
    "arguments as text": [
        user("Where?"),
        assistant("", tool_calls=[call("where", '{"is": "it"}')]),
        tool("x"),
    ],
    "no calls": [user("Hello"), assistant("Hi.", tool_calls=[]), user("again")],
    "thoughts": [
        user("Hello"),
        assistant("<think>\nShe greets.\n</think>\n\nHi."),
        user("again"),
        assistant("Hi again.", reasoning_content="\nTwice.\n"),
        user("and"),
        assistant("Yes?", reasoning="Thrice."),
    ],
    "thinking": [user("Hello"), assistant("Hi.", thinking="She greets.", reasoning="no")],
    "names": [system("Be brief."), user("Hello", name="ann"), assistant("Hi", name="bob", refusal=None)],
    "other fields": [user("Hello", weight=0.5, tags=["a", {"b": None}]), assistant("Well", prefix=True)],
    "only other fields": [user("Hello", tools="t"), {"role": "assistant", "prefix": True}],
    "tools in a message": [{"role": "system", "content": "Help.", "tools": '[{"name": "x"}]'}, user("Hello")],
    "a part": [user(parts("Hello"))],
    "parts": [
        system(parts("Be ", "brief.")),
        user(parts("Hello", " and", "\nbye")),
        assistant("Hi."),
        user(parts("again ")),
    ],
    "parts and texts": [
        system("Be brief."),
        user(parts("Look: ", "it")),
        assistant(parts("I see.")),
        user("!"),
    ],
    "a part with more": [user([{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}])],
    "empty parts": [user(parts("", "")), assistant(parts("Hi")), user(parts("x"))],
    "parts of tools": [user(parts("Weather?")), assistant(None, tool_calls=[WEATHER]), tool(parts("a", "b"))],
}


def inner_tokenizer() -> Inner:
    """256 bytes, and the control tokens of many templates."""
    vocab = {token: i for i, token in enumerate(byte_alphabet())}
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    control = (
        "<s>",
        "</s>",
        "<pad>",
        "<image>",
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "[INST]",
        "[/INST]",
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    inner.add_tokens([AddedToken("<think>", lstrip=True, rstrip=True, normalized=False)])
    return inner


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=inner_tokenizer(), **SPECIAL)


def joined(messages: Messages) -> Messages:
    """Messages whose parts are joined, as templates that know only texts need them."""
    return [
        message | {"content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def asked(messages: Messages) -> Messages:
    """The messages that reach the template from a request, which is the same from both endpoints."""
    raw = json.dumps({"messages": messages}).encode()
    (prompt,) = parse_chat(raw).prompts
    assert parse_tokenize(raw)[1] == prompt
    return prompt  # type: ignore[return-value]


def of_theirs(tokenizer: Any, messages: Messages, **options: Any) -> Any:
    """What transformers makes of a chat, or None where it raises anything."""
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **options
        )
    except Exception:
        return None


def of_ours(make: Callable[[Messages], Any], messages: Messages) -> Any:
    """What we make of a chat, or None for a clear refusal. Any other error is one of ours."""
    try:
        return make(messages)
    except RequestError as error:
        is_clear = error.code == "no_chat_template" or error.message.startswith(REFUSES)
        return None if is_clear and (error.status, error.param) == (400, "messages") else error


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_chat_are_those_of_transformers_or_both_refuse_it(name: str, theirs: Any) -> None:
    form, source = TEMPLATES[name]
    inner = inner_tokenizer()
    ours = Tokenizer(inner, (), ChatTemplate(source, SPECIAL, name), inner.get_vocab_size())

    def ids(messages: Messages) -> list[int]:
        return ours.encode(ours.apply_chat_template(asked(messages)), add_special_tokens=False)

    got = {chat: of_ours(ids, messages) for chat, messages in CHATS.items()}
    given = {chat: joined(messages) if form == "text" else messages for chat, messages in CHATS.items()}
    want = {chat: of_theirs(theirs, messages, chat_template=source) for chat, messages in given.items()}

    assert got == want
    assert sum(each is not None for each in want.values()) > len(CHATS) // 3


SHOW = "{{ bos_token }},{{ eos_token }},{{ cls_token is defined }},{{ image_token }},{{ odd }},"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": SHOW}
MORE = "additional_chat_templates/"
SETTINGS, OLDER, JINJA = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
FOLDERS: dict[str, dict[str, Any]] = {
    "no template": {SETTINGS: {"chat_template": None}},
    "a text": {SETTINGS: {"eos_token": "</s>", "bos_token": None}},
    "a list": {SETTINGS: {"chat_template": [{"name": n, "template": n} for n in ("default", "tool_use")]}},
    "a name twice": {SETTINGS: {"chat_template": [{"name": "default", "template": t} for t in ("a", "b")]}},
    "no default": {SETTINGS: {"chat_template": [{"name": "rag", "template": "a"}]}},
    "an empty list": {SETTINGS: {"chat_template": []}},
    "a file": {JINJA: "a\r\n{{ eos_token }}\n\n"},
    "an empty file": {JINJA: ""},
    "a file with a mark": {JINJA: "\ufeffa"},
    "a file and others": {JINJA: "a", MORE + "tool_use.jinja": "b", MORE + "notes.txt": "c"},
    "a default among others": {JINJA: "a", MORE + "default.jinja": "b"},
    "only a default among others": {MORE + "default.jinja": "b", MORE + "rag.jinja": "c"},
    "only others": {MORE + "rag.jinja": "c"},
    "older tokens": {OLDER: {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "image_token": "<image>"}},
    "older tokens overrule": {
        SETTINGS: {"eos_token": "<pad>", "bos_token": "<s>"},
        OLDER: {"eos_token": "</s>"},
    },
    "older tokens are not read": {
        SETTINGS: {
            "eos_token": "<pad>",
            "added_tokens_decoder": {"258": {"content": "<pad>", "special": True}},
        },
        OLDER: {"eos_token": "</s>", "bos_token": "<s>"},
    },
    "tokens of its own": {SETTINGS: {"image_token": "<image>", "extra_special_tokens": {"odd": "<pad>"}}},
    "a list of more tokens": {SETTINGS: {"extra_special_tokens": ["<pad>"], "add_bos_token": True}},
    "a token as a dict": {
        SETTINGS: {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}
    },
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folders_template_and_special_tokens_are_those_that_transformers_reads(
    kind: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    inner_tokenizer().save(str(tmp_path / "tokenizer.json"))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    config = dict.fromkeys((*sizes, "max_position_embeddings"), 8) | {
        "model_type": "llama",
        "vocab_size": 300,
    }
    files = FOLDERS[kind] | {SETTINGS: CONFIG | FOLDERS[kind].get(SETTINGS, {}), "config.json": config}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_bytes(text.encode())
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    got = of_ours(lambda chat: load_tokenizer(tmp_path).apply_chat_template(chat), CHATS["one"])

    assert got == of_theirs(theirs, CHATS["one"], tokenize=False)


def render(source: str, messages: Messages) -> str:
    return ChatTemplate(source, {}, "here").render(messages)


def test_developer_is_system_unless_the_template_knows_it() -> None:
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}]

    assert render(source, messages) == "system"
    assert render(source + "{% if false %}developer{% endif %}", messages) == "developer"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ '<' + messages[0].content + '>' }}",
        "{{ messages[0].content[1:] }}",
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content.split('a') }}",
        "{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}",
        "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{{ '' }}{% endif %}",
        "{% if messages[0].content is not string %}{{ raise_exception('only text') }}{% endif %}",
        "{% if 'b' in messages[0].content %}b{% endif %}{{ messages[0].content | length }}",
        "{{ raise_exception(messages[0].content) }}",
        "{% for p in messages[0].content %}{% endfor %}{{ messages[1].content }}",
    ],
)
def test_a_template_that_takes_content_as_a_text_gets_its_parts_joined(source: str) -> None:
    messages = [user(parts("a", "bc")), user(parts("d"))]

    def text(messages: Messages) -> str:
        return render(source, messages)

    assert of_ours(text, messages) == of_ours(text, joined(messages))
    assert messages == [user(parts("a", "bc")), user(parts("d"))]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{% for m in messages %}{{ m | dictsort }}{% endfor %}",
        "{% for m in messages if m.content is not string %}{{ (m.content | last).text }}{% endfor %}",
        "{% for p in messages[0].content | reverse %}{{ p.text }}{% endfor %}",
    ],
)
def test_a_template_that_writes_messages_or_goes_over_parts_backwards_gets_the_parts(
    source: str, theirs: Any
) -> None:
    messages = [user(parts("a", "bc")), user("d")]

    assert render(source, messages) == of_theirs(theirs, messages, chat_template=source, tokenize=False)
