"""Every command of the README runs here, in order, or is run elsewhere and named below."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUN_ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/integration/test_quickstart.py",
    "bash scripts/test.sh": "CI",
    # Needs a GPU; its output is in docs/benchmarks.
    "python scripts/bench/pretrain.py qwen3_moe_1gpu": "docs/benchmarks/README.md",
    "python -m pip download": "tests/integration/test_make_tasks.py",
    "python scripts/make_tasks.py": "tests/integration/test_make_tasks.py",
    "python scripts/bench/muon_step.py": "tests/integration/test_muon_benchmarks.py",
}


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_has_the_two_commands_first() -> None:
    assert readme_commands()[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_other_command_runs(tmp_path) -> None:
    for name in ("scripts", "megacomposer", "kernels", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ran = 0
    for command in readme_commands():
        if any(command.startswith(known) for known in RUN_ELSEWHERE):
            continue
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        ran += 1
    assert ran >= 8
    assert (tmp_path / "runs" / "tiny" / "report" / "loss.png").stat().st_size > 10_000
