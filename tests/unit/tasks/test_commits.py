"""Tasks from the commits of a real git repository, proven in sandboxes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grading import copy_site, grading_backend, write_tree

from megacomposer.env.audit import AuditLog
from megacomposer.env.sandbox import SandboxSpec
from megacomposer.tasks.bundle import load_bundle
from megacomposer.tasks.commit_message import scrub_message
from megacomposer.tasks.commits import Commit, CommitTasks, CommitTasksConfig, commits_of

START = {
    "pyproject.toml": '[project]\nname = "purse"\nversion = "1.0"\nlicense = "MIT"\n',
    "src/purse/__init__.py": "from purse.coins import total\n",
    "src/purse/coins.py": "def total(coins):\n    return sum(coins)\n",
    "tests/test_coins.py": (
        "import purse\n\n\ndef test_total():\n    assert purse.total([1, 2]) == 3\n"
    ),
}
CHANGE = {
    "src/purse/coins.py": (
        "def total(coins):\n    return sum(coins)\n\n\ndef change(amount, coins):\n"
        "    counts = {}\n    for coin in sorted(coins, reverse=True):\n"
        "        counts[coin], amount = divmod(amount, coin)\n    return counts\n"
    ),
    "src/purse/__init__.py": "from purse.coins import change, total\n",
    "tests/test_coins.py": (
        "import purse\n\n\ndef test_total():\n    assert purse.total([1, 2]) == 3\n\n\n"
        "def test_change():\n    assert purse.change(7, [1, 5]) == {5: 1, 1: 2}\n"
    ),
    "tests/test_import.py": (
        "from purse import change\n\n\ndef test_nothing():\n    assert change(0, [1]) == {1: 0}\n"
    ),
    "CHANGES": "change() is new\n",
}
LINE = "return sorted(coins, key=weight)"
MESSAGE = """Give change in few coins (#12)

`purse.change` takes an amount and the coins there are, largest coin first, and
returns how many of each are needed.

        counts[coin], amount = divmod(amount, coin)

See https://forge.example/purse/issues/12 and 0123abcd4567.
Fixes #12
Signed-off-by: A Person <person@forge.example>
"""


def git(root: Path, *arguments: str) -> str:
    identity = (
        "-c",
        "user.name=p",
        "-c",
        "user.email=p@forge.example",
        "-c",
        "commit.gpgsign=false",
    )
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path, message: str, files: dict[str, str]) -> str:
    write_tree(root, files)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """Commits of every kind, and the sha of the one that is a task."""
    root = tmp_path / "purse"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    commit(root, "Start", START)
    good = commit(root, MESSAGE, CHANGE)
    commit(root, "Say what it is in a longer text", {"README.md": "# purse\n"})
    commit(root, "Document the sum of all coins", {
        "src/purse/coins.py": '"""Coins."""\n\n' + CHANGE["src/purse/coins.py"],
    })  # fmt: skip
    commit(root, "Test the total of no coins at all", {
        "tests/test_empty.py": (
            "import purse\n\n\ndef test_empty():\n    assert purse.total([]) == 0\n"
        ),
    })  # fmt: skip
    commit(root, "Note the unit of coins and test twice", {
        "src/purse/coins.py": '"""Coins in cents."""\n\n' + CHANGE["src/purse/coins.py"],
        "tests/test_twice.py": (
            "import purse\n\n\ndef test_one():\n    assert purse.total([1]) == 1\n"
        ),
    })  # fmt: skip
    commit(root, "Break the count of coins and its test", {
        "src/purse/count.py": "def count(coins):\n    return len(coins) + 1\n",
        "tests/test_count.py": (
            "from purse.count import count\n\n\ndef test_count():\n    assert count([1]) == 1\n"
        ),
    })  # fmt: skip
    commit(root, "fix", {
        "src/purse/count.py": "def count(coins):\n    return len(coins)\n",
        "tests/test_count.py": (
            "from purse.count import count\n\n\ndef test_count():\n    assert count([1]) == 1\n\n\n"
            "def test_none():\n    assert count([]) == 0\n"
        ),
    })  # fmt: skip
    return root, good


def test_a_commit_with_code_and_tests_becomes_a_proven_task(
    tmp_path: Path, history: tuple[Path, str]
) -> None:
    root, good = history
    out = tmp_path / "tasks"

    async def scenario() -> dict[str, Any]:
        async with grading_backend(tmp_path / "store", AuditLog()) as backend:
            site = copy_site(tmp_path / "site")
            maker = CommitTasks(CommitTasksConfig(runs=2), backend, site=site)
            report = await maker.make(root, out)
            (directory,) = (path for path in out.iterdir() if path.is_dir())
            task = await load_bundle(directory, backend)
            assert task.tests.fail_to_pass == (
                "tests/test_coins.py::test_change",
                "tests/test_import.py::test_nothing",  # not collected before
            )
            assert task.tests.pass_to_pass == ("tests/test_coins.py::test_total",)
            assert "def change" in task.gold_patch
            assert "CHANGES" in task.gold_patch
            assert "test_change" not in task.gold_patch
            assert task.origin["commit"] == good
            async with await backend.start(SandboxSpec(base=task.base)) as sandbox:
                commits = await sandbox.exec(["git", "rev-list", "--all", "--count"])
                assert commits.stdout == b"1\n"
                found = await sandbox.exec(["grep", "-rlE", "change|divmod", "."])
                assert (found.exit_code, found.stdout) == (1, b"")
            async with await backend.start(SandboxSpec(base=task.pristine)) as sandbox:
                names = await sandbox.exec(["find", ".", "-type", "f"])
                assert b"coins.py" in names.stdout
                assert b"src/" not in names.stdout
            assert task.instruction.startswith("Give change in few coins")
            for hint in ("#12", "http", "0123abcd", "Signed", "forge.example", "divmod(amount"):
                assert hint not in task.instruction
            return report

    report = asyncio.run(scenario())
    assert len(report["kept"]) == 1
    assert report["candidates"] == 7
    assert report["rejected"] == {
        "no_description": 1,  # "fix"
        "too_few_tests": 4,  # no tests; two that pass before; one that fails after
        "too_small": 1,  # tests only
    }


def test_a_writer_may_write_what_is_asked(tmp_path: Path, history: tuple[Path, str]) -> None:
    root, good = history

    async def writer(change: Commit, gold_patch: str) -> str:
        assert change.sha == good
        assert "+def change" in gold_patch
        return "Please add purse.change, which gives back few coins. See http://forge.example/1"

    async def scenario() -> str:
        async with grading_backend(tmp_path / "store", AuditLog()) as backend:
            site = copy_site(tmp_path / "site")
            config = CommitTasksConfig(runs=1, revision=good, max_commits=1)
            maker = CommitTasks(config, backend, site=site, writer=writer)
            await maker.make(root, tmp_path / "out")
            (directory,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
            return (await load_bundle(directory, backend)).instruction

    text = asyncio.run(scenario())
    assert text == "Please add purse.change, which gives back few coins. See"


def test_commits_are_listed_with_what_they_change(history: tuple[Path, str]) -> None:
    root, good = history
    found = commits_of(root, "HEAD", 100)
    assert len(found) == 7
    one = next(change for change in found if change.sha == good)
    assert one.paths == tuple(sorted(CHANGE))
    assert one.message.startswith("Give change")
    with pytest.raises(ValueError, match="not a git repository with nonsense"):
        commits_of(root, "nonsense", 10)
    with pytest.raises(ValueError, match="--upload-pack"):
        commits_of(root, "--upload-pack=x", 10)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("Add x (#7)\n\nCloses #7, refs acme/tool#12", "Add x"),
        ("Revert it\n\nThis reverts commit 0123456789abcdef0123456789abcdef01234567.",
         "Revert it\n\nThis reverts commit ."),
        ("Add a\n\nCo-authored-by: B <b@c.example>\nReviewed-by: C\nChange-Id: I0123", "Add a"),
        ("Say why\n\nBecause 1234567 coins are many and decade is a word.",
         "Say why\n\nBecause 1234567 coins are many and decade is a word."),
        (f"Do it\n\n```python\n{LINE}\n```\nso it is", "Do it\n\nso it is"),
        (f"Do it\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n+  {LINE}", "Do it"),
    ],
)  # fmt: skip
def test_a_message_is_scrubbed_of_hints(message: str, kept: str) -> None:
    patch = f"+++ b/x.py\n+    {LINE}\n+    x = 1\n"
    assert scrub_message(message, patch) == kept


def test_a_bad_config_names_the_field() -> None:
    with pytest.raises(ValueError, match="runs must be at least 1"):
        CommitTasksConfig(runs=0)


def test_the_script_writes_the_same_task_and_its_packages(
    tmp_path: Path, history: tuple[Path, str]
) -> None:
    root, good = history
    out = tmp_path / "tasks"
    site = copy_site(tmp_path / "site")
    script = Path(__file__).parents[3] / "scripts" / "make_commit_tasks.py"
    command = [sys.executable, str(script), "purse", "--out", "tasks", "--site", str(site)]
    result = subprocess.run(
        [*command, "--max-commits", "20"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["event"], report["kept"]) == ("make_tasks", 1)
    assert sum(report["rejected"].values()) == report["candidates"] - 1
    assert (out / "site" / "pytest").is_dir()
    assert [path.parent.name for path in out.glob("*/task.json")] == [f"purse-commit-{good[:12]}"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (again.returncode, "is not empty" in again.stderr) == (1, True)
