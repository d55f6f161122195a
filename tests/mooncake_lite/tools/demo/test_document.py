"""The demo's document: found in every kind of installation, long enough, cut at a word."""

from importlib.resources import files

import pytest

from mooncake_lite.tools.demo.document import DOCUMENT_TOKENS, document_text, shorten

pytestmark = pytest.mark.quick


def words(text: str) -> int:
    return len(text.split())


def test_links_keep_their_words_and_lose_their_targets() -> None:
    packaged = files("mooncake_lite.tools.demo") / "document.txt"

    assert "](" in packaged.read_text(encoding="utf-8")
    assert "](" not in document_text()
    assert "the life of a request follows them through the code" in " ".join(document_text().split())


def test_the_document_is_long_enough_even_at_six_characters_a_token() -> None:
    assert len(document_text()) > 6 * DOCUMENT_TOKENS


def test_a_text_is_cut_after_the_last_word_that_fits() -> None:
    assert shorten("one  two\nthree four", 3, words) == "one  two\nthree"


def test_a_text_that_fits_is_not_cut() -> None:
    assert shorten("one two", 2, words) == "one two"


def test_nothing_fits_into_no_tokens() -> None:
    assert shorten("one two", 0, words) == ""
