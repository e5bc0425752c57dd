"""Rules that every file of the repository keeps."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_CODE = {".py", ".sh", ".sbatch", ".cpp", ".cu", ".h"}
_MAX_LINES = 450


def texts(files: list[Path]) -> dict[Path, str]:
    """The text of each file that has one; binary files and symlinks are left out."""
    found = {}
    for file in files:
        if (ROOT / file).is_symlink() or not (ROOT / file).is_file():
            continue
        content = (ROOT / file).read_bytes()
        if b"\0" not in content:
            found[file] = content.decode()
    return found


def test_no_file_has_a_name_that_says_nothing(repository_files: list[Path]) -> None:
    empty_names = {"util", "utils", "helper", "helpers", "common", "misc"}
    offenders = [f for f in repository_files if empty_names & {f.stem, *f.parent.parts}]
    assert offenders == []


def test_no_source_file_outgrows_a_reader(repository_files: list[Path]) -> None:
    sizes = {
        file: text.count("\n")
        for file, text in texts(repository_files).items()
        if file.suffix in _CODE and file.parts[0] != "tests"
    }
    assert {file: lines for file, lines in sizes.items() if lines > _MAX_LINES} == {}


def test_no_file_names_a_folder_of_one_machine_or_a_package_index(
    repository_files: list[Path],
) -> None:
    folders = "|".join([r"home/(?!agent\b)[a-z]", "root/", "Users/[A-Za-z]", "work/"])
    options = "|".join(["extra-index-url", "index-url", "find-links"])
    pattern = re.compile(rf"(?<![\w.$}}*)])/({folders})|--({options})[ =\"',]+\w+://")
    offenders = {
        str(file): match.group()
        for file, text in texts(repository_files).items()
        if (match := pattern.search(text))
    }
    assert offenders == {}


def test_code_is_ascii(repository_files: list[Path]) -> None:
    offenders = [
        str(file)
        for file, text in texts(repository_files).items()
        if file.suffix in _CODE and file.parts[0] != "tests" and not text.isascii()
    ]
    assert offenders == []
