"""SWE-bench records: from a clone on this machine to a task that its own patch solves."""

from __future__ import annotations

import json
import subprocess

import pytest
from grading import FAIL_TO_PASS, PASS_TO_PASS, SOLUTION, SOURCE, TESTS, Grader, diff, write_tree

from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.sandbox import SandboxSpec
from megacomposer.tasks.swe_bench import find_mirror, read_records, task_from_record

OLD_TESTS = "def test_nothing():\n    pass\n"


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    with Grader(tmp_path_factory.mktemp("swe")) as grader:
        yield grader


@pytest.fixture
def clone(tmp_path):
    """owner/adder, whose second commit is the solution."""
    root = write_tree(
        tmp_path / "mirrors" / "owner__adder",
        {
            "adder.py": SOURCE,
            "tests/test_adder.py": OLD_TESTS,
            ".gitattributes": "tests export-ignore\n",
        },
    )

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(
            command, cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "base")
    base = git("rev-parse", "HEAD")
    (root / "adder.py").write_text(SOLUTION)
    git("commit", "-qam", "the solution")
    return tmp_path / "mirrors", base


def row(base: str, **changes: object) -> dict[str, object]:
    return {
        "instance_id": "owner__adder-1",
        "repo": "owner/adder",
        "base_commit": base,
        "problem_statement": "add does not add.",
        "patch": diff("adder.py", SOURCE, SOLUTION).decode(),
        "test_patch": diff("tests/test_adder.py", OLD_TESTS, TESTS).decode(),
        "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": list(PASS_TO_PASS),
        "hints_text": "ignored",
        **changes,
    }


def read_one(tmp_path, record):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record) + "\n\n")
    (found,) = read_records(path)
    return found


def test_a_record_becomes_a_task_that_its_patch_solves(grader, tmp_path, clone) -> None:
    mirrors, base = clone
    record = read_one(tmp_path, row(base))
    task = grader.run(
        task_from_record(
            record,
            mirrors,
            grader.backend,
            mounts=grader.mounts,
            verifier=Verifier(grader.backend),
        )
    )
    assert task.tests.fail_to_pass == FAIL_TO_PASS
    assert task.tests.pass_to_pass == PASS_TO_PASS
    assert task.tests.protected_paths == ("tests/test_adder.py",)
    assert task.origin["commit"] == base

    async def seen() -> bytes:
        async with await grader.backend.start(SandboxSpec(base=task.base)) as sandbox:
            listing = await sandbox.exec(["sh", "-c", "find . | sort; cat adder.py tests/*.py"])
            return listing.stdout

    text = grader.run(seen())
    assert b"raise NotImplementedError" in text
    assert b"test_nothing" in text, "export-ignore does not hide the tests"
    assert b".git/" not in text, "no history"
    assert b"return a + b" not in text


def test_a_record_whose_patch_does_not_solve_it_is_refused(grader, tmp_path, clone) -> None:
    mirrors, base = clone
    wrong = SOLUTION.replace("a + b", "a - b")
    cases = [
        ({"patch": diff("adder.py", SOURCE, wrong).decode()}, "does not pass"),
        ({"FAIL_TO_PASS": "[]"}, "passes without"),
    ]
    for changes, words in cases:
        record = read_one(tmp_path, row(base, **changes))
        with pytest.raises(ValueError, match=words):
            grader.run(
                task_from_record(
                    record,
                    mirrors,
                    grader.backend,
                    mounts=grader.mounts,
                    verifier=Verifier(grader.backend),
                )
            )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_commit": "--help"}, "is no commit"),
        ({"base_commit": "0" * 40}, "owner__adder"),
        ({"repo": "owner/other"}, "no clone of owner/other"),
        ({"repo": "../adder"}, "not owner/name"),
        ({"FAIL_TO_PASS": "test_x"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": '["test_x (app.tests.T)"]'}, "no id of pytest"),
        ({"test_patch": "nonsense"}, "test_patch"),
    ],
)
def test_a_broken_record_is_refused_by_field(grader, tmp_path, clone, changes, words) -> None:
    mirrors, base = clone
    record = read_one(tmp_path, row(base, **changes))
    with pytest.raises(ValueError, match=words):
        grader.run(task_from_record(record, mirrors, grader.backend))


def test_a_row_without_a_field_is_named(tmp_path) -> None:
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"instance_id": "x"}]))
    with pytest.raises(ValueError, match="row 0: .*repo"):
        read_records(path)


def test_mirrors_and_bare_clones_are_found(tmp_path) -> None:
    bare = tmp_path / "owner" / "name.git"
    bare.mkdir(parents=True)
    (bare / "HEAD").write_text("ref: refs/heads/main\n")
    assert find_mirror(tmp_path, "owner/name") == bare
