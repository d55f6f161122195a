"""The default model against its oracle: the published file as transformers and the GGUF itself tell it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mooncake_lite.model.forward import load_model
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import examples
from tests.mooncake_lite.model.conftest import byte_alphabet

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969, 2 men walked on the moon.  They",
    "Water boils at 100 degrees Celsius because",
    "Once upon a time there was a small robot who",
    "SELECT name, age FROM people WHERE",
    "1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Ingredients:\n- 200 g flour\n- 2 eggs\n",
    "¿Dónde está la biblioteca? La biblioteca está",
    "Photosynthesis is the process by which",
    "\n\n# Installation\n\n",
]
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child in two sentences.",
    "What is 17 + 25?",
    "Name three primary colours.",
    "Who wrote Hamlet?",
    "Translate 'good morning' to French.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def tokenizer(default_folder: Path) -> Tokenizer:
    return load_tokenizer(default_folder)


@pytest.fixture(scope="module")
def oracle(default_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()


def test_every_tensor_has_the_bits_that_transformers_reads_from_the_gguf(
    default_folder: Path, oracle: Any
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(default_folder / GGUF, return_tensors=True, model_to_load=oracle)["tensors"]

    with safe_open(default_folder / "model.safetensors", "pt") as ours:
        assert set(ours.keys()) == set(theirs)
        assert len(theirs) == 272
        for name, tensor in theirs.items():
            assert torch.equal(ours.get_tensor(name).view(torch.int32), tensor.view(torch.int32)), name


# ---------------------------------------------------------------------------------------- tokens


class PlainBpe:
    """The file's tokenizer from its own lists, in the plainest words: smollm pre-tokenizer, ranked merges."""

    SPLIT = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", regex.UNICODE
    )

    def __init__(self, gguf_path: Path):
        import gguf

        fields = gguf.GGUFReader(gguf_path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        assert fields["tokenizer.ggml.pre"].contents() == "smollm"
        self.ids = {token: i for i, token in enumerate(tokens)}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        return [token_id for word in self.words(text) for token_id in self.word_ids(word)]

    def words(self, text: str) -> Iterator[str]:
        for part in regex.split(r"(\p{N})", text):
            yield from self.SPLIT.findall(part)

    def word_ids(self, word: str) -> list[int]:
        alphabet = byte_alphabet()
        # The vocabulary has no token for 21 bytes that its training text never held; they are left out.
        parts = [alphabet[byte] for byte in word.encode() if alphabet[byte] in self.ids]
        while len(parts) > 1:
            pairs = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(parts)]
            best = min(pairs)
            if best == len(self.ranks):
                break
            i = pairs.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def plain(default_folder: Path) -> PlainBpe:
    return PlainBpe(default_folder / GGUF)


@given(
    text=st.text(
        alphabet=st.one_of(
            st.sampled_from("aezTh .,'\n\t0123é你²½"), st.characters(exclude_categories=["Cs"])
        ),
        max_size=40,
    )
)
@settings(max_examples=examples(200))
def test_token_ids_follow_the_pre_tokenizer_that_the_file_names(
    text: str, tokenizer: Tokenizer, plain: PlainBpe
) -> None:
    ids = tokenizer.encode(text)

    assert ids == plain.encode(text)
    if all(byte_alphabet()[byte] in plain.ids for byte in text.encode()):
        assert tokenizer.decode(ids) == text


def test_a_text_of_the_longest_token_has_no_fewer_tokens_than_its_length_says(tokenizer: Tokenizer) -> None:
    longest = "\n" + " " * 80
    assert len(tokenizer.encode(longest)) == tokenizer.fewest_tokens(longest) == 1
    assert tokenizer.fewest_tokens(longest * 1000) == 1000
    assert (tokenizer.encode("\x04" * 1000), tokenizer.fewest_tokens("\x04" * 1000)) == ([], 0)


def test_half_of_a_surrogate_pair_reads_as_a_question_mark(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_transformers_reads_our_tokenizer_and_template_alike(
    default_folder: Path, tokenizer: Tokenizer
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_folder)
    conversation = [{"role": "system", "content": "Be brief."}, *QUESTION]

    for text in [*TEXTS, "  42  blanks before  7 digits", "<|im_start|>user\n"]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    for messages in (QUESTION, conversation):
        text = tokenizer.apply_chat_template(messages)
        assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert tokenizer.eos_ids == (0, 2)
    assert theirs.eos_token_id == 2


@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_answer_is_shown_piece_by_piece_without_loss(ids: list[int], tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()

    shown = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.flush()

    assert shown == tokenizer.decode(ids)


# ---------------------------------------------------------------------------------------- answers


def test_greedy_answers_to_20_prompts_are_those_of_transformers(
    default_folder: Path,
    tokenizer: Tokenizer,
    oracle: Any,
    paged_loop: Callable[..., Any],
    differences: Callable[..., list[str]],
    soak: int,
) -> None:
    new = 16 if soak == 1 else 32
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts = [tokenizer.encode(text) for text in [*TEXTS, *chats]]
    assert len(prompts) == 20

    answers = paged_loop(load_model(default_folder), sequences=len(prompts)).greedy(prompts, new)

    for prompt, answer in zip(prompts, answers):
        assert len(answer) == new
        assert differences(oracle, prompt, answer) == [], tokenizer.decode(prompt)
    assert "Paris" in tokenizer.decode(answers[len(TEXTS)])
