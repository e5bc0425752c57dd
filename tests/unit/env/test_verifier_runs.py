"""What is read from a run of tests: outcomes, order, broken files, lint, JUnit, flaky tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from grading import (
    FAIL_TO_PASS,
    SOLUTION,
    SOURCE,
    Grader,
    diff,
    write_tree,
)

from megacomposer.env.grading.flaky import stable_outcomes
from megacomposer.env.grading.junit import JunitError, parse_junit
from megacomposer.env.grading.python_runtime import runtime_of
from megacomposer.env.grading.test_run import RunOptions, TestRun, run_tests
from megacomposer.env.sandbox import SandboxSpec
from megacomposer.env.task import BehaviourCheck, TestPlan, task_from_json

OUTCOMES = """
import pytest


def test_pass():
    pass


def test_fail():
    assert 0


@pytest.mark.skip
def test_skip():
    pass


@pytest.mark.xfail
def test_xfail():
    assert 0


@pytest.mark.xfail(strict=False)
def test_xpass():
    pass


@pytest.mark.xfail(strict=True)
def test_xpass_strict():
    pass


@pytest.fixture
def broken():
    raise RuntimeError


@pytest.fixture
def broken_end():
    yield
    raise RuntimeError


def test_setup(broken):
    pass


def test_teardown(broken_end):
    pass


@pytest.mark.parametrize("value", ["a/b::c", "\\u00e9", "two words[]"])
def test_names(value):
    pass


def test_forks():
    import os

    child = os.fork()
    if child == 0:
        raise SystemExit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    with Grader(tmp_path_factory.mktemp("runs")) as grader:
        ruff = shutil.which("ruff")
        assert ruff, "ruff is among the development packages"
        (grader.site / "bin").mkdir()
        shutil.copy2(ruff, grader.site / "bin" / "ruff")
        yield grader


def run_files(
    grader: Grader, root: Path, files: dict[str, str], options: RunOptions, **plan
) -> TestRun:
    async def scenario() -> TestRun:
        backend = grader.backend
        base = await backend.import_tree(str(write_tree(root, files)))
        runtime = runtime_of(grader.mounts, in_place=not backend.isolates)
        async with await backend.start(SandboxSpec(base=base, mounts=runtime.mounts)) as sandbox:
            return await run_tests(sandbox, TestPlan(**plan), runtime, options)

    run = grader.run(scenario())
    assert isinstance(run, TestRun)
    return run


def test_every_outcome_has_its_name(grader, tmp_path) -> None:
    run = run_files(grader, tmp_path, {"test_all.py": OUTCOMES}, RunOptions())
    assert not run.problems
    short = {name.partition("::")[2]: outcome for name, outcome in run.outcomes.items()}
    assert {name: out for name, out in short.items() if not name.startswith("test_names")} == {
        "test_pass": "passed",
        "test_fail": "failed",
        "test_skip": "skipped",
        "test_xfail": "xfailed",
        "test_xpass": "xpassed",
        "test_xpass_strict": "failed",
        "test_setup": "error",
        "test_teardown": "error",
        "test_forks": "passed",
    }
    assert sum(name.startswith("test_names") for name in short) == 3
    assert "assert 0" in run.details["test_all.py::test_fail"]
    assert run.collected == 12


def test_a_file_that_does_not_import_hides_no_other(grader, tmp_path) -> None:
    files = {"test_a.py": "import nothing_of_the_kind\n", "test_b.py": "def test_b():\n    pass\n"}
    run = run_files(grader, tmp_path, files, RunOptions())
    assert run.outcomes == {"test_b.py::test_b": "passed"}
    assert "nothing_of_the_kind" in run.details["test_a.py"]
    assert not run.problems


def test_seed_shuffles_and_the_same_seed_gives_the_same_order(grader, tmp_path) -> None:
    names = [f"test_{number}" for number in range(30)]
    source = "".join(f"def {name}():\n    pass\n" for name in names)
    orders = [
        list(
            run_files(
                grader, tmp_path / str(seed), {"test_x.py": source}, RunOptions(seed=seed)
            ).outcomes
        )
        for seed in (None, 1, 1, 2)
    ]
    assert [name.partition("::")[2] for name in orders[0]] == names
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3


def test_the_configuration_of_the_repository_counts_but_not_its_added_options(
    grader, tmp_path
) -> None:
    files = {
        "pytest.ini": "[pytest]\naddopts = --cov=x -n 4\npython_functions = check_*\n"
        "required_plugins = pytest-cov\n",
        "test_x.py": "def check_this():\n    pass\ndef test_that():\n    pass\n",
    }
    run = run_files(grader, tmp_path, files, RunOptions(config_file="pytest.ini"))
    assert run.outcomes == {"test_x.py::check_this": "passed"}


def test_names_of_variables_do_not_tell_grading_from_work(grader, tmp_path) -> None:
    source = "import os\ndef test_env():\n    raise ValueError(sorted(os.environ))\n"
    run = run_files(grader, tmp_path, {"test_x.py": source}, RunOptions())
    text = run.details["test_x.py::test_env"]
    seen = set(text[text.rindex("[") :].replace("]", "").replace("'", "").split(", "))
    seen = {name.strip("[\n ") for name in seen}
    allowed = {"HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PWD", "TMPDIR"}
    allowed |= {
        "USER",
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
    }
    assert seen <= allowed | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD"}


def test_tests_that_start_python_find_the_package_and_its_dependencies(grader, tmp_path) -> None:
    source = (
        "import subprocess, sys\n"
        "def test_child():\n"
        "    code = 'import own, iniconfig; print(own.NAME)'\n"
        "    out = subprocess.run([sys.executable, '-c', code], capture_output=True, cwd='/')\n"
        "    assert out.stdout == b'own\\n', out.stderr\n"
    )
    files = {"src/own.py": "NAME = 'own'\n", "tests/test_x.py": source}
    run = run_files(grader, tmp_path, files, RunOptions())
    assert run.outcomes == {"tests/test_x.py::test_child": "passed"}, run.details


def test_new_lint_findings_are_told_from_old_ones(grader) -> None:
    bad = "import os\n" + SOLUTION
    verdict = grader.grade(diff("adder.py", SOURCE, bad))
    assert verdict.passed
    assert verdict.lint.available
    assert [finding.split()[1] for finding in verdict.lint.new_findings] == ["F401"]
    old = {"adder.py": bad.replace("return a + b", "raise NotImplementedError")}
    verdict = grader.grade(diff("adder.py", old["adder.py"], bad), files=old)
    assert verdict.lint.available
    assert verdict.lint.new_findings == ()


def test_absent_tests_and_no_tests_at_all_do_not_pass(grader) -> None:
    gold = diff("adder.py", SOURCE, SOLUTION)
    verdict = grader.grade(gold, fail_to_pass=(*FAIL_TO_PASS, "tests/test_adder.py::test_no"))
    assert not verdict.passed
    assert verdict.tests.fail_to_pass["tests/test_adder.py::test_no"] == "absent"
    missing = grader.grade(gold, fail_to_pass=(*FAIL_TO_PASS, "tests/test_other.py::test_no"))
    assert not missing.passed
    assert missing.tests.fail_to_pass[FAIL_TO_PASS[0]] == "passed"
    assert not grader.grade(gold, fail_to_pass=(), pass_to_pass=()).passed


def test_size_counts_lines_files_and_binaries(grader) -> None:
    patch = diff("adder.py", SOURCE, SOLUTION) + diff("notes.txt", None, "a\nb\n")
    patch += (
        b"diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0000000..f76dd23\n"
        b"GIT binary patch\nliteral 1\nIcmZPo000310RR91\n\nliteral 0\nHcmV?d00001\n\n"
    )
    size = grader.grade(patch).patch
    assert (size.files, size.lines_added, size.lines_removed, size.binary_files) == (3, 3, 1, 1)


JUNIT_RUNNER = """
import sys
from adder import add
ok = add(1, 2) == 3
case = "" if ok else "<failure message='wrong'>no</failure>"
with open(sys.argv[1], "w") as file:
    file.write(f"<testsuites><testsuite name='s' tests='2' failures='{int(not ok)}'>"
               f"<testcase classname='sum' name='small'>{case}</testcase>"
               f"<testcase name='nothing'/></testsuite></testsuites>")
sys.exit(int(not ok))
"""


def test_other_runners_are_read_from_junit_xml(grader) -> None:
    plan = {
        "files": {"tests/run.py": JUNIT_RUNNER},
        "runner": "junit",
        "command": ("python3", "tests/run.py", "{report}"),
        "env": {"PYTHONPATH": "."},
        "fail_to_pass": ("sum::small",),
        "pass_to_pass": ("nothing",),
    }
    gold = grader.grade(diff("adder.py", SOURCE, SOLUTION), **plan)
    assert gold.passed, gold.reason
    wrong = grader.grade(diff("adder.py", SOURCE, "def add(a, b):\n    return 0\n"), **plan)
    assert not wrong.passed
    assert wrong.tests.fail_to_pass == {"sum::small": "failed"}
    dead = grader.grade(diff("adder.py", SOURCE, "import os\nos._exit(0)\n"), **plan)
    assert not dead.passed
    assert set(dead.tests.required.values()) == {"absent"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"4 passed",
        b"<html/>",
        b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuites>&a;</testsuites>",
        "<testsuite/>".encode("utf-16"),
    ],
)
def test_what_is_no_junit_report_is_refused(text) -> None:
    with pytest.raises(JunitError):
        parse_junit(text)


def test_a_junit_report_with_wrong_counts_or_repeated_names_is_seen() -> None:
    report = parse_junit(
        b"<testsuite name='s' tests='9'><testcase name='a'/><testcase name='a'><error/>"
        b"</testcase><testcase name='a'/></testsuite>"
    )
    assert report.outcomes == {"a": "error"}
    assert report.problems == ("suite 's' declares tests=9, has 3",)


UNSTABLE = """
import os
import sys
import time

import pytest

seen = []


def test_always():
    pass


def test_never():
    assert False


def test_order():
    seen.append("order")
    assert "after" not in seen


def test_after():
    seen.append("after")


@pytest.mark.parametrize("number", range(8))
def test_hash(number):
    assert hash(f"x{number}") % 2


def test_local_time():
    assert time.timezone == 0


@pytest.mark.skip
def test_skipped():
    pass
"""


def test_flaky_tests_are_told_from_stable_ones(grader, tmp_path) -> None:
    async def scenario():
        backend = grader.backend
        base = await backend.import_tree(str(write_tree(tmp_path, {"test_x.py": UNSTABLE})))
        runtime = runtime_of(grader.mounts, in_place=not backend.isolates)
        return await stable_outcomes(backend, base, TestPlan(), runtime, runs=6, seed=3)

    stability = grader.run(scenario())
    assert stability.stable_pass == ("test_x.py::test_always", "test_x.py::test_after")
    assert stability.stable_fail == ("test_x.py::test_never",)
    flaky = {name.partition("::")[2] for name in stability.flaky}
    assert {"test_order", "test_local_time", "test_skipped"} <= flaky
    assert any(name.startswith("test_hash") for name in flaky)
    assert not stability.problems


def test_checks_of_behaviour_survive_the_task_file(grader) -> None:
    check = BehaviourCheck(name="n", command=("{python}", "-V"), stdout=f"{sys.version[:4]}\n")
    task = grader.task(behaviour=(check,))
    assert task_from_json(task.to_json()) == task
