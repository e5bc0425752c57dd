"""A small project of our own, with what deletion must cope with."""

from __future__ import annotations

from pathlib import Path

SAMPLE = {
    "pyproject.toml": """
[project]
name = "shelf-keeper"
version = "1.2"
license = "Apache-2.0"
dependencies = []

[tool.pytest.ini_options]
addopts = "-q"
testpaths = ["tests"]
""",
    "README.md": "# shelf-keeper\n\n`late_fee` says what a late book costs.\n",
    "src/shelf/__init__.py": '''"""Books, loans and reports."""

from . import text
from .books import Book, sort_books
from .loans import late_fee, loan_days
from .report import FORMATS, as_csv, as_table, monthly_report

__all__ = [
    "Book",
    "FORMATS",
    "as_csv",
    "as_table",
    "late_fee",  # by days
    "loan_days",
    "monthly_report", "sort_books",
    "text",
]
''',
    "src/shelf/books.py": '''"""Books."""

from shelf.text import normal_title


class Book:
    """A title with its author, compared by what a reader would look up."""

    def __init__(self, title, author):
        self.title = title
        self.author = author

    def sort_key(self):
        """Author first, then the title without its article."""
        surname = self.author.split()[-1].lower()
        return surname, normal_title(self.title)

    def initials(self):
        """The first letters of the author's names, with dots."""
        letters = [part[0].upper() for part in self.author.split()]
        joined = ".".join(letters)
        return joined + "." if joined else ""


def sort_books(books):
    """Books in the order of a shelf."""
    keyed = [(book.sort_key(), position) for position, book in enumerate(books)]
    keyed.sort()
    return [books[position] for _, position in keyed]
''',
    "src/shelf/text.py": '''"""Titles."""

_ARTICLES = ("the ", "a ", "an ")


def normal_title(title):
    """A title in lower case without its article."""
    lowered = title.strip().lower()
    for article in _ARTICLES:
        if lowered.startswith(article):
            return lowered[len(article):]
    return lowered


class Heading:
    """A title over a line of the same length."""

    def __init__(self, title, mark="="):
        self.title = title.strip()
        self.mark = mark

    def lines(self):
        """Both lines."""
        width = max(len(self.title), 1)
        return [self.title, self.mark * width]
''',
    "src/shelf/loans.py": '''"""Loans."""

_GRACE_DAYS = 2
_MAXIMUM_CENTS = 1500


def loan_days(start, end):
    """Days from start to end; at least one."""
    difference = end - start
    if difference < 1:
        difference = 1
    return difference


# The fee grows by the day, up to a maximum.
def late_fee(days, daily_cents=25):
    """What a book costs that is `days` late, in cents.

    The first two days are free, and it never costs more than 1500.
    """
    counted_days = _without_grace(days)
    return min(counted_days * daily_cents, _MAXIMUM_CENTS)


def _without_grace(days):
    remaining_days = days - _GRACE_DAYS
    return remaining_days if remaining_days > 0 else 0
''',
    "src/shelf/report.py": '''"""Reports."""

from shelf.loans import late_fee, loan_days


def as_csv(rows):
    """Rows as comma-separated lines."""
    lines = [",".join(str(cell) for cell in row) for row in rows]
    lines.append("")
    return "\\n".join(lines)


def as_table(rows):
    """Rows as lines with bars."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines.append("")
    return "\\n".join(lines)


FORMATS = {
    "csv": as_csv,
    "table": as_table,
}


def monthly_report(loans, format="csv"):
    """What each loan of (title, start, end) cost, in one of FORMATS."""
    rows = []
    for title, start, end in loans:
        length_days = loan_days(start, end)
        rows.append((title, length_days, late_fee(length_days - 14)))
    return FORMATS[format](rows)
''',
    "tests/test_books.py": """import shelf


def test_order():
    books = [shelf.Book("The Tombs", "Ursula Le Guin"), shelf.Book("A Dog", "Ann Abe")]
    assert [book.title for book in shelf.sort_books(books)] == ["A Dog", "The Tombs"]


def test_initials():
    assert shelf.Book("x", "ursula k guin").initials() == "U.K.G."


def test_no_initials():
    assert shelf.Book("x", "").initials() == ""
""",
    "tests/test_loans.py": """import pytest

import shelf


@pytest.mark.parametrize(("days", "cents"), [(1, 0), (2, 0), (3, 25), (100, 1500)])
def test_fee(days, cents):
    assert shelf.late_fee(days) == cents


def test_days():
    assert shelf.loan_days(3, 3) == 1
    assert shelf.loan_days(3, 9) == 6
""",
    "tests/test_report.py": """import shelf


LOANS = [("Tombs", 1, 31)]


def test_csv():
    assert shelf.as_csv([(1, 2)]) == "1,2\\n"


def test_table():
    assert shelf.FORMATS["table"]([(1, 2)]) == "| 1 | 2 |\\n"


def test_report():
    assert shelf.monthly_report(LOANS) == "Tombs,30,350\\n"


def test_report_table():
    assert shelf.monthly_report(LOANS, format="table") == "| Tombs | 30 | 350 |\\n"
""",
    "tests/test_text.py": """import shelf
from shelf.text import normal_title


def test_article():
    assert normal_title("The Tombs") == "tombs"


def test_no_article():
    assert normal_title(" Tombs") == "tombs"


def test_heading():
    assert shelf.text.Heading(" Tombs ").lines() == ["Tombs", "====="]


def test_marked_heading():
    assert shelf.text.Heading("x", mark="-").lines() == ["x", "-"]
""",
}


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
