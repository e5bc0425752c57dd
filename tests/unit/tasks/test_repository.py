"""A wrong layout would make tasks of the wrong code, or grade with the wrong tests."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megacomposer.tasks.repository import describe_repository, open_repository

Project = Callable[[dict[str, str]], Path]


def test_src_layout_and_metadata_are_read(sample_project: Path) -> None:
    repository = describe_repository(sample_project)
    assert (repository.name, repository.version) == ("shelf-keeper", "1.2")
    assert repository.licence == "Apache-2.0"
    assert repository.source_root == "src"
    assert repository.modules["shelf.loans"] == "src/shelf/loans.py"
    assert repository.modules["shelf"] == "src/shelf/__init__.py"
    assert repository.test_paths == ("tests",)
    assert set(repository.protected_paths) == {"pyproject.toml", "tests/**"}


def test_tests_inside_the_package_are_not_its_code(project: Project) -> None:
    root = project(
        {
            "kit/__init__.py": "",
            "kit/core.py": "def f(): return 1\n",
            "kit/tests/__init__.py": "",
            "kit/tests/test_core.py": "def test_f(): pass\n",
            "setup.py": "raise SystemExit('never run')\n",
            "tox.ini": "[pytest]\n",
        }
    )
    repository = describe_repository(root)
    assert sorted(repository.modules) == ["kit", "kit.core"]
    assert repository.test_paths == ("kit/tests",)
    assert repository.protected_paths == ("kit/tests/**", "tox.ini")


def test_single_module_beside_its_test(project: Project) -> None:
    root = project({"tool.py": "X = 1\n", "setup.py": "", "test_tool.py": "import tool\n"})
    repository = describe_repository(root)
    assert repository.modules == {"tool": "tool.py"}
    assert repository.test_paths == ("test_tool.py",)


def test_package_info_wins_and_extras_are_not_required(project: Project) -> None:
    info = (
        "Metadata-Version: 2.1\nName: Kit\nVersion: 3\nClassifier: License :: OSI Approved :: "
        "BSD License\nRequires-Dist: six>=1\nRequires-Dist: black; extra == 'dev'\n\nReadme.\n"
    )
    root = project({"PKG-INFO": info, "kit.py": "", "test_kit.py": ""})
    repository = describe_repository(root)
    assert (repository.name, repository.version) == ("Kit", "3")
    assert repository.licence == "BSD License"
    assert repository.requires == ("six>=1",)


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_archive_is_unpacked_and_named_by_its_digest(
    suffix: str, sample_project: Path, tmp_path: Path
) -> None:
    archive = tmp_path / f"shelf-keeper-1.2{suffix}"
    names = [path for path in sorted(sample_project.rglob("*")) if path.is_file()]
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as opened:
            for path in names:
                opened.write(path, path.relative_to(tmp_path))
    else:
        with tarfile.open(archive, "w:gz") as opened_tar:
            for path in names:
                opened_tar.add(path, str(path.relative_to(tmp_path)))
    repository = open_repository(archive, tmp_path / "scratch")
    assert repository.root == tmp_path / "scratch" / "shelf-keeper"
    assert "shelf.loans" in repository.modules
    assert len(repository.archive_sha256) == 64


def test_archive_member_that_leaves_the_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "evil-1.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        info = tarfile.TarInfo("evil-1/../../escaped.py")
        info.size = 1
        opened.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="leaves the archive"):
        open_repository(archive, tmp_path / "scratch")
    assert not (tmp_path / "escaped.py").exists()


def test_what_is_no_project_is_refused_with_a_reason(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        open_repository(tmp_path / "absent", tmp_path / "a")
    text = tmp_path / "notes.txt"
    text.write_text("no archive")
    with pytest.raises(ValueError, match="not a readable"):
        open_repository(text, tmp_path / "b")
    with pytest.raises(ValueError, match="no test files"):
        describe_repository(project({"kit/__init__.py": ""}))
