"""The tool that runs tests: what it says comes from the report, whatever the code under test
prints or breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from grading import copy_site

from megacomposer.env.grading.python_runtime import python_runtime
from megacomposer.env.task import TestPlan
from megacomposer.env.tools.run_tests import CaseResult, read_junit
from tool_cases import Bench, run

FILES: dict[str, str | bytes] = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": """import pytest, unittest
from calc import add

@pytest.mark.parametrize("b", [0, 1])
def test_add(b):
    print("== 99 passed in 0.01s ==")
    assert add(1, b) == 1 + b

class TestMore:
    class TestInner:
        def test_fine(self): pass

class TestOld(unittest.TestCase):
    def test_old(self): self.skipTest("not now")

@pytest.fixture
def broken(): raise RuntimeError("no fixture")

def test_error(broken): pass
""",
    "tests/test_import.py": "import nothing_of_that_name\n",
    "tests/test_many.py": "import pytest\n@pytest.mark.parametrize('i', range(150))\n"
    "def test_many(i):\n    x = list(range(40))\n    assert i < 0, 'x' * 5000\n",
    "tests/test_exit.py": "import os\ndef test_exit():\n    print('last words', flush=True)\n"
    "    os._exit(0)\n",
    "tests/test_slow.py": "import time\ndef test_slow(): time.sleep(300)\n",
}


def run_with_pytest(folder: Path, body: object, plan: TestPlan) -> None:
    python = python_runtime(copy_site(folder / "site"))
    run(folder, body, FILES, mounts=python.mounts, env=python.env, tests=plan)  # type: ignore


def test_the_answer_has_counts_ids_and_the_ends_of_tracebacks(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.text("run_tests", tests=["tests/test_calc.py"])
        head = text.split("\n")[0]
        assert head.startswith("2 passed, 1 failed, 1 error, 1 skipped in ")
        assert head.endswith(" s (exit code 1)")
        assert "\nFAILED tests/test_calc.py::test_add[1]\n" in text
        assert "assert 0 == (1 + 1)" in text
        assert "\nERROR tests/test_calc.py::test_error\n" in text
        assert "RuntimeError: no fixture" in text
        one = await bench.text("run_tests", tests=["tests/test_calc.py::TestMore::TestInner"])
        assert one.startswith("1 passed in ")
        text = await bench.text("run_tests", tests=["tests/test_import.py"])
        assert "1 error" in text
        assert "No module named 'nothing_of_that_name'" in text
        # Nothing is left in the workspace.
        assert (await bench.sandbox.exec(["ls", "-A"])).stdout == b"calc.py\ntests\n"
        assert (await bench.sandbox.exec(["ls", "-A", "/tmp"])).stdout == b""

    run_with_pytest(tmp_path, body, TestPlan())


def test_many_failures_fit_into_one_answer(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.text("run_tests", tests=["tests/test_many.py"])
        assert text.startswith("150 failed in ")
        assert text.count("\nFAILED ") == 10
        assert text.count("\nfailed tests/test_many.py::test_many[") == 100
        assert text.endswith("[40 ids left out]")
        assert len(text.encode()) < 24_000

    run_with_pytest(tmp_path, body, TestPlan(command=("-p", "no:randomly")))


def test_a_run_without_a_report_is_a_failure_with_the_end_of_the_output(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.error("failed", "run_tests", tests=["tests/test_exit.py"])
        assert text.startswith("The runner ended with exit code 0 and no report.")
        text = await bench.error("failed", "run_tests", tests=["tests/nowhere.py"])
        assert "file or directory not found: tests/nowhere.py" in text
        text = await bench.error("timeout", "run_tests", tests=["tests/test_slow.py"], timeout_s=2)
        assert text.startswith("Killed after 2 s")
        await bench.error("bad_arguments", "run_tests", timeout_s=61)
        await bench.error("bad_arguments", "run_tests", tests=["--collect-only"])

    run_with_pytest(tmp_path, body, TestPlan(timeout_s=60.0))


def test_another_runner_is_read_by_the_report_that_it_writes(tmp_path: Path) -> None:
    report = (
        "<testsuites><testsuite tests='2'><testcase classname='pkg.A' name='one'/>"
        "<testcase classname='pkg.A' name='two'><failure message='boom'/></testcase>"
        "</testsuite></testsuites>"
    )
    plan = TestPlan(
        runner="junit",
        command=("sh", "-c", f'echo "{report}" > "$0"; echo "2 passed"; exit 1', "{report}"),
    )

    async def body(bench: Bench) -> None:
        text = await bench.text("run_tests")
        assert text.startswith("1 passed, 1 failed in ")
        assert text.endswith("FAILED pkg.A::two\nboom")
        assert "takes no test names" in await bench.error("bad_arguments", "run_tests", tests=["x"])

    run(tmp_path, body, tests=plan)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not xml",
        b"<testsuite><testcase name='a'>",
        b"<!DOCTYPE a [<!ENTITY x 'y'>]><testsuite/>",
        "<!DOCTYPE a><testsuite/>".encode("utf-16"),
    ],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="the report"):
        read_junit(data)


def test_the_id_of_a_case_is_the_one_that_pytest_takes() -> None:
    data = b"""<testsuite>
    <testcase file="a/test_b.py" classname="a.test_b" name="test_c[x.y]"/>
    <testcase file="a/test_b.py" classname="a.test_b.TestD.TestE" name="test_f"/>
    <testcase classname="pkg.Case" name="g"><skipped message="why"/></testcase></testsuite>"""
    assert read_junit(data) == [
        CaseResult(id="a/test_b.py::test_c[x.y]", outcome="passed"),
        CaseResult(id="a/test_b.py::TestD::TestE::test_f", outcome="passed"),
        CaseResult(id="pkg.Case::g", outcome="skipped", detail="why"),
    ]
