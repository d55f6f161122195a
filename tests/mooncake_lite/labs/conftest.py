"""A tree that tests of labs may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mooncake_lite.labs.trees import copy_of_tree, git, restore


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the tree that stays as it is, and one to change."""
    folder = tmp_path_factory.mktemp("copies")
    return copy_of_tree(folder / "original"), copy_of_tree(folder / "tree")


@pytest.fixture
def tree(copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree in which the test works, and which it may change."""
    original, tree = copies
    restore(tree, original)
    monkeypatch.chdir(tree)
    return tree


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree under git, on the branch main, in which the test works."""
    tree = copy_of_tree(tmp_path / "repository")
    git(tree, "init", "-q", "-b", "main")
    git(tree, "config", "user.name", "a")
    git(tree, "config", "user.email", "a@b")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "all")
    monkeypatch.chdir(tree)
    return tree
