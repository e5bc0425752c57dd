"""A statement that leaks the code, or does not say what is wanted, makes a worthless task."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.repository import describe_repository
from megacomposer.tasks.statement import write_statement


def statement(root: Path, kind: str, *symbols: str, modules: frozenset[str] = frozenset()) -> str:
    repository = describe_repository(root)
    graph = CallGraph(repository)
    return write_statement(repository, graph, kind, frozenset(symbols), modules, frozenset())


def test_says_place_signature_and_documentation_but_no_code(sample_project: Path) -> None:
    text = statement(
        sample_project, "function", "shelf.loans:late_fee", "shelf.loans:_without_grace"
    )
    assert "def late_fee(days, daily_cents=25)" in text
    assert "The first two days are free" in text
    assert "`src/shelf/loans.py`" in text
    assert "`shelf.late_fee`" in text
    assert "_without_grace" not in text
    assert "counted_days" not in text
    assert "min(" not in text


def test_class_shows_its_public_methods(sample_project: Path) -> None:
    text = statement(sample_project, "class", "shelf.books:Book")
    assert "class Book" in text
    assert "def __init__(self, title, author)" in text
    assert "def initials(self)" in text
    assert "The first letters of the author's names" in text
    assert "joined" not in text


def test_module_is_named_as_a_file(sample_project: Path) -> None:
    text = statement(
        sample_project, "module", "shelf.text:normal_title", modules=frozenset({"shelf.text"})
    )
    assert "The whole file `src/shelf/text.py`" in text


def test_undocumented_code_is_refused(sample_project: Path) -> None:
    path = sample_project / "src/shelf/loans.py"
    path.write_text(path.read_text().replace('"""Days from start to end; at least one."""', ""))
    with pytest.raises(ValueError, match="no documentation"):
        statement(sample_project, "function", "shelf.loans:loan_days")
