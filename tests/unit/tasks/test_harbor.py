"""Harbor task directories: ours come back whole and grade alike; others are read or refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grading import FAIL_TO_PASS, SOLUTION, SOURCE, Grader, diff, write_tree

from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.task import EgressRule
from megacomposer.tasks.harbor import read_harbor, write_harbor
from megacomposer.tasks.harbor_foreign import REWARD_ID

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--nothing'\n",
    "na\u00efve.txt": "\u00e9\r\n",
    "tests/conftest.py": "",
}


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    with Grader(tmp_path_factory.mktemp("harbor")) as grader:
        yield grader


def test_a_task_comes_back_as_it_was(grader, tmp_path) -> None:
    task = dataclasses.replace(
        grader.task(FILES),
        id='odd id/"1"',
        env={"A": 'b"\n'},
        difficulty={"files": 2.0},
        egress=(EgressRule(host="*.example.org"),),
    )
    directory = tmp_path / "task"
    grader.run(write_harbor(task, directory, grader.backend))
    back = grader.run(read_harbor(directory, grader.backend))
    assert dataclasses.replace(back, mounts=task.mounts) == task
    assert [mount.target for mount in back.mounts] == ["/opt/site"]
    settings = tomllib.loads((directory / "task.toml").read_text())
    assert settings["schema_version"] == "1.4"
    assert settings["task"]["name"] == "megacomposer/odd-id-1"
    assert settings["environment"]["allowed_hosts"] == ["*.example.org"]
    assert settings["environment"]["env"] == {"A": 'b"\n'}
    verifier = Verifier(grader.backend)
    gold = grader.run(verifier.verify(back, task.gold_patch.encode()))
    assert gold.passed, gold.reason
    with pytest.raises(ValueError, match="not empty"):
        grader.run(write_harbor(task, directory, grader.backend))


def test_the_agent_s_part_of_the_directory_holds_no_solution_and_no_hidden_test(
    grader, tmp_path
) -> None:
    hidden = grader.task({"tests/test_hidden.py": "def test_secret_word():\n    pass\n"})
    task = dataclasses.replace(grader.task(), pristine=hidden.pristine)
    directory = tmp_path / "task"
    grader.run(write_harbor(task, directory, grader.backend))
    visible = b"".join(
        file.read_bytes()
        for file in (directory / "environment").iterdir()
        if file.name != "site.tar"
    )
    assert b"raise NotImplementedError" in visible
    for secret in (b"return a + b", b"test_secret_word"):
        assert secret not in visible
    assert b"test_secret_word" in (directory / "tests" / "pristine.tar").read_bytes()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(SOLUTION, "1"), (SOURCE, "0"), ("import os\nos._exit(0)\n", "0")],
)
def test_test_sh_writes_the_reward(grader, tmp_path, answer, reward) -> None:
    directory = tmp_path / "task"
    grader.run(write_harbor(grader.task(FILES), directory, grader.backend))
    workspace, logs = tmp_path / "workspace", tmp_path / "logs"
    write_tree(workspace, {"adder.py": answer, "conftest.py": "import os\nos._exit(0)\n"})
    setting = directory / "tests" / "setting.json"
    setting.write_text(setting.read_text().replace("/opt/site", str(grader.site)))
    done = subprocess.run(
        [sys.executable, "-I", str(directory / "tests" / "grade.py")],
        cwd=workspace,
        env={**os.environ, "VERIFIER_LOGS": str(logs)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert (logs / "reward.txt").read_text().strip() == reward, done.stdout
    assert not (workspace / "conftest.py").exists()
    script = (directory / "tests" / "test.sh").read_text()
    assert "/tests/grade.py" in script
    assert os.access(directory / "tests" / "test.sh", os.X_OK)


FOREIGN = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 30.0\n[environment]\n'
    'memory = "1G"\ncpus = 1\n',
    "instruction.md": "Write the word done into /app/answer.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n# a comment\nCOPY start.txt ./\n",
    "environment/start.txt": "start\n",
    "tests/test.sh": "#!/bin/bash\nif grep -q done /app/answer.txt\n"
    "then echo 1 > /logs/verifier/reward.txt\nelse echo 0 > /logs/verifier/reward.txt\nfi\n",
}


def test_a_task_of_another_author_is_graded_by_its_own_script(grader, tmp_path) -> None:
    directory = write_tree(tmp_path / "foreign", FOREIGN)
    task = grader.run(read_harbor(directory, grader.backend))
    assert task.id == "foreign"
    assert task.instruction == "Write the word done into /workspace/answer.txt.\n"
    assert task.limits.memory_bytes == 1 << 30
    assert task.tests.fail_to_pass == (REWARD_ID,)
    if not grader.backend.isolates:
        pytest.skip("the script names /workspace, which only a sandbox has")
    verifier = Verifier(grader.backend)
    nothing = grader.run(verifier.verify(task, b""))
    assert nothing.tests.fail_to_pass == {REWARD_ID: "failed"}, nothing.reason
    right = grader.run(verifier.verify(task, diff("answer.txt", None, "done\n")))
    assert right.passed, right.reason
    forged = diff(".harbor/test.sh", None, "echo 1 > .harbor/logs/verifier/reward.txt\n")
    assert not grader.run(verifier.verify(task, forged)).passed


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("task.toml", None, "no Harbor task"),
        ("task.toml", "= 1", "task.toml"),
        ("instruction.md", None, "instruction.md is missing"),
        ("environment/Dockerfile", "FROM x\nRUN apt-get install y\n", "accept_image_steps"),
        ("environment/Dockerfile", "FROM x\nWORKDIR /app\nCOPY ../../x .\n", "not a file there"),
        ("environment/Dockerfile", "FROM x\nWORKDIR /app\nCOPY start.txt /etc/\n", "stay in"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(grader, tmp_path, file, text, words) -> None:
    directory = write_tree(tmp_path / "foreign", FOREIGN)
    path: Path = directory / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        grader.run(read_harbor(directory, grader.backend))


def test_only_pytest_tasks_are_written(grader, tmp_path) -> None:
    task = grader.task(runner="junit", fail_to_pass=FAIL_TO_PASS)
    with pytest.raises(ValueError, match="only pytest"):
        grader.run(write_harbor(task, tmp_path / "x", grader.backend))
