"""Grades inside a container of another harness: becomes `tests/grade.py` of a Harbor task.

Beside it lie `task.json`, `pristine.tar` and four files of megacomposer/env, which it runs as they
are. Writes the reward, 0 or 1, to /logs/verifier. Standard library only.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOGS = Path(os.environ.get("VERIFIER_LOGS", "/logs/verifier"))
PASSING = ("passed", "xpassed")


def run_pytest(plan: dict[str, Any], setting: dict[str, Any], names: list[str]) -> Any:
    """A reading of the run; see `megacomposer.env.grading.test_run.run_tests`."""
    from control_tests import ControlTests
    from report_reading import ReportReading

    mentioned = dict.fromkeys(name.partition("::")[0] for name in names)
    files = [file for file in mentioned if os.path.exists(file)]
    control = ControlTests.beside(files[0]) if files else None
    if control is not None:
        Path(control.path).write_bytes(control.source)
    key = secrets.token_bytes(32)
    paths = plan["env"].get("PYTHONPATH", "src:.").split(":")
    request = {
        "key": key.hex(),
        "args": [
            *setting["pytest_arguments"],
            *("-c", setting["config_file"] or "/dev/null"),
            *plan["command"],
            *files,
            *([control.path] if control else []),
        ],
        "paths": [path for path in paths if path],
        "site": setting["site"],
        "seed": None,
        "environ": {"PYTHONDONTWRITEBYTECODE": "1"},
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("PY")}
    env.update({name: text for name, text in plan["env"].items() if not name.startswith("PY")})
    result = subprocess.run(
        [sys.executable, "-I", "-B", "-c", (HERE / "pytest_report.py").read_text()],
        env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        timeout=plan["timeout_s"],
    )
    reading = ReportReading(key)
    reading.read(result.stdout, result.returncode, "a signal" if result.returncode < 0 else "")
    if control is not None:
        reading.problems += control.problems(reading.outcomes, reading.complete)
        Path(control.path).unlink()
    return reading


def main() -> None:
    from tree_program import replace

    task = json.loads((HERE / "task.json").read_text())
    setting = json.loads((HERE / "setting.json").read_text())
    plan = task["tests"]
    replace(".", setting["patterns"], str(HERE / "pristine.tar"))
    names = [*plan["fail_to_pass"], *plan["pass_to_pass"]]
    reading = run_pytest(plan, setting, names)
    bad = [name for name in names if reading.outcomes.get(name) not in PASSING]
    reward = float(bool(names) and not bad and not reading.problems)
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / "reward.txt").write_text(f"{reward:g}\n")
    details = {"not_passed": bad, "problems": reading.problems, "outcomes": reading.outcomes}
    (LOGS / "evidence.json").write_text(json.dumps(details, indent=1))
    print(f"reward {reward:g}; {len(names) - len(bad)} of {len(names)} required tests pass")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
