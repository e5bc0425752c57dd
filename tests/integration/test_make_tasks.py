"""From a repository to tasks that a second machine can load, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from grading import copy_site, grading_backend
from shelf_project import SAMPLE, write_files

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend import bubblewrap
from megacomposer.env.grading.verifier import Verifier, score
from megacomposer.env.sandbox import SandboxSpec
from megacomposer.tasks.bundle import load_bundle

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tasks.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def backend_arguments() -> list[str]:
    """bubblewrap where it runs, else no sandbox: the pipeline is the same."""
    if asyncio.run(bubblewrap.probe()):
        return ["--backend", "local", "--unsafe"]
    return ["--backend", "bubblewrap"]


def make_tasks(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def last_line(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["event"] == "make_tasks"
    return report


async def grade_from_files(out: Path, store: Path) -> list[tuple[float, float, set[str]]]:
    """(score of the true code, score of nothing, files in the sandbox) of each task."""
    results = []
    async with grading_backend(store, AuditLog()) as backend:
        verifier = Verifier(backend, lint=False)
        for file in sorted(out.glob("*/task.json")):
            task = await load_bundle(file.parent, backend)
            gold = await verifier.verify(task, task.gold_patch.encode())
            nothing = await verifier.verify(task, b"")
            assert {*nothing.tests.pass_to_pass.values()} == {"passed"}
            assert "passed" not in nothing.tests.fail_to_pass.values()
            async with await backend.start(SandboxSpec(base=task.pristine)) as sandbox:
                found = await sandbox.exec(["find", ".", "-type", "f"])
            results.append((score(gold), score(nothing), set(found.stdout.decode().split())))
    return results


@pytest.mark.slow
def test_all_kinds_of_tasks_are_made_and_graded_on_another_machine(
    site: Path, backend_arguments: list[str], tmp_path: Path
) -> None:
    root = write_files(tmp_path / "shelf-keeper", SAMPLE)
    (root / "build/lib/shelf").mkdir(parents=True)
    (root / "build/lib/shelf/loans.py").write_text(SAMPLE["src/shelf/loans.py"])
    archive = tmp_path / "shelf-keeper-1.2.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(root, "shelf-keeper-1.2")
    out = tmp_path / "out"
    options = ["--count", 6, "--site", site, *backend_arguments]
    # Relative, as a user gives them.
    result = make_tasks(archive.name, "--out", out.name, *options, cwd=tmp_path)
    report = last_line(result)
    funnel = json.loads((out / "funnel.json").read_text())
    assert report["kept"] == len(funnel["kept"]) >= 4
    assert report["candidates"] == report["kept"] + sum(report["rejected"].values())
    assert {task["kind"] for task in funnel["kept"]} == {"function", "class", "module", "multi"}
    assert len(funnel["sdist_sha256"]) == 64
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["funnel.json", "site", *(task["id"] for task in funnel["kept"])]
    )
    # Another place and another store: only what was written counts.
    moved = out.rename(tmp_path / "elsewhere")
    graded = asyncio.run(grade_from_files(moved, tmp_path / "store"))
    assert len(graded) == report["kept"]
    for gold, nothing, pristine in graded:
        assert (gold, nothing) == (1.0, 0.0)
        assert not [path for path in pristine if "shelf/" in path], "the agent's answer is in it"


@pytest.mark.slow
def test_bad_candidates_are_rejected_for_their_reason(
    site: Path, backend_arguments: list[str], tmp_path: Path
) -> None:
    """One function each whose deletion makes no fair task."""
    functions = {
        "leaked": "def leaked(value):\n    '''Doubles the value, and one.'''\n"
        "    doubled_value = value * 2\n    corrected_value = doubled_value + 1\n"
        "    return int(corrected_value)\n",
        "read": "def read(value):\n    '''Adds one to the value given.'''\n    more = value + 1\n"
        "    less = more - 0\n    return less\n",
        "crash": "def crash(value):\n    '''Adds three to the value given.'''\n"
        "    more = value + 1\n    less = more + 2\n    return less\n",
        "silent": "def silent(value):\n    more = value + 1\n    less = more + 5\n"
        "    return less\n",
        "untested": "def untested(value):\n    '''Adds four to the value given.'''\n"
        "    more = value + 1\n    less = more + 3\n    return less\n",
    }
    files = {
        "kit.py": "\n\n".join(functions.values()),
        "setup.cfg": "[metadata]\nname = kit\nversion = 1\n",
        "docs/how.txt": "Inside:\n" + functions["leaked"],
        "tests/test_kit.py": "import pathlib\n\nimport kit\n\n\n"
        "def test_leaked_one():\n    assert kit.leaked(1) == 3\n\n\n"
        "def test_leaked_two():\n    assert kit.leaked(2) == 5\n\n\n"
        "def test_read():\n    assert kit.read(1) == 2\n\n\n"
        "def test_source():\n    source = pathlib.Path(kit.__file__).read_text()\n"
        "    assert 'def read' in source\n\n\n"
        "def test_crash():\n    table = {'crash': getattr(kit, 'crash', None)}\n"
        "    assert table['crash'](1) == 4\n\n\n"
        "def test_silent():\n    assert kit.silent(1) == 7\n\n\n"
        "def test_silent_too():\n    assert kit.silent(2) == 8\n\n\n"
        "def test_sound():\n    assert kit\n",
    }
    root = write_files(tmp_path / "kit", files)
    out = tmp_path / "out"
    result = make_tasks(root, "--count", 5, "--out", out, "--site", site, *backend_arguments)
    assert last_line(result)["kept"] == 0
    examples = json.loads((out / "funnel.json").read_text())["examples"]
    names = {reason: text.partition(":")[0] for reason, text in examples.items()}
    reasons = {name.removeprefix("function-kit-"): reason for reason, name in names.items()}
    assert reasons == {
        "leaked": "residue",
        "read": "unrelated_failure",
        "crash": "wrong_reason",
        "silent": "no_description",
        "untested": "too_few_tests",
    }


def test_bad_input_is_one_line_and_exit_code_1(site: Path, tmp_path: Path) -> None:
    failing = {"kit.py": "x = 1\n", "test_kit.py": "import absent_package\n"}
    cases = {
        "no such directory": [tmp_path / "absent"],
        "no test files": [write_files(tmp_path / "bare", {"kit.py": "x = 1\n"})],
        "do not run here": [write_files(tmp_path / "failing", failing)],
        "kinds: colour": [write_files(tmp_path / "kit", SAMPLE), "--kinds", "colour"],
    }
    for number, (words, arguments) in enumerate(cases.items()):
        out = tmp_path / f"out{number}"
        unsafe = ["--backend", "local", "--unsafe"]
        result = make_tasks(*arguments, "--out", out, "--site", site, *unsafe)
        assert result.returncode == 1, words
        assert result.stdout == ""
        errors = [line for line in result.stderr.splitlines() if line.startswith("make_tasks: ")]
        assert len(errors) == 1
        assert words in errors[0]
        assert result.stderr.splitlines()[-1] == errors[0]


@pytest.mark.slow
def test_package_from_the_index_becomes_tasks(backend_arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sdist"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    download = subprocess.run(
        [*pip, "--dest", str(folder), "inflection==0.5.1"],
        # Its setup.py imports what lies beside it, which PYTHONSAFEPATH forbids.
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in download.stderr:
        pytest.skip(f"no package index: {download.stderr.strip().splitlines()[-1]}")
    assert download.returncode == 0, download.stderr
    (archive,) = folder.iterdir()
    out = tmp_path / "out"
    result = make_tasks(archive, "--count", 1, "--out", out, *backend_arguments)
    assert last_line(result)["kept"] == 1
    funnel = json.loads((out / "funnel.json").read_text())
    assert funnel["package"] == "inflection"
    assert funnel["licence"] == "MIT"
    assert funnel["stable_tests"] > 400
