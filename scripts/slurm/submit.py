"""Renders pretrain.sbatch for a recipe into the run directory, and submits it.

    python scripts/slurm/submit.py --nodes 4 --time 24:00:00 [--dry-run] \
        RECIPE [--section.field value ...]

Options of the cluster come before the recipe. What follows it is train.py's, and is checked here,
before the job waits in a queue. A requeued job resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

from megacomposer.config.cli import parse_command_line
from megacomposer.recipes.pretrain import RECIPES

SCRIPTS = Path(__file__).resolve().parents[1]


class ShellTemplate(string.Template):
    delimiter = "@@"  # "$" is the shell's


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="submit.py [cluster options] RECIPE [--section.field value ...]", allow_abbrev=False
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1)
    add("--gpus-per-node", type=int, default=8, help="default 8; 0 for a job on CPUs")
    add("--processes-per-node", type=int, help="default: one per GPU, or one without GPUs")
    add("--time", required=True, help="limit, as SLURM writes it: 24:00:00")
    add("--signal-lead-s", type=int, default=300, help="seconds before it to save (default 300)")
    add("--partition")
    add("--account")
    add("--directive", action="append", default=[], help="any other, as qos=high; repeatable")
    add("--container-image", help="for the pyxis plugin of srun; mounts the code and this folder")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")
    add("recipe")
    add("overrides", nargs=argparse.REMAINDER, help="as for train.py")
    return parser.parse_args()


def render(options: argparse.Namespace, run_dir: Path) -> str:
    """The batch script of a job that trains into `run_dir`."""
    directives = {"partition": options.partition, "account": options.account}
    directives["gpus-per-node"] = options.gpus_per_node or None
    lines = [f"{name}={value}" for name, value in directives.items() if value] + options.directive
    srun_options = ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    if options.container_image:
        mounts = ",".join(f"{folder}:{folder}" for folder in (SCRIPTS.parent, Path.cwd()))
        srun_options.append(f"--container-image={options.container_image}")
        srun_options.append(f"--container-mounts={mounts}")
    return ShellTemplate((SCRIPTS / "slurm/pretrain.sbatch").read_text()).substitute(
        job_name=shlex.quote(run_dir.name),
        nodes=options.nodes,
        time=options.time,
        working_dir=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(run_dir)),
        signal=f"B:USR1@{options.signal_lead_s}",
        directives="\n".join(f"#SBATCH --{line}" for line in lines),
        launch=shlex.quote(str(SCRIPTS / "launch")),
        processes_per_node=options.processes_per_node or options.gpus_per_node or 1,
        srun_options=shlex.join(srun_options),
        arguments=shlex.join([options.recipe, *options.overrides]),
    )


def main() -> None:
    options = parse_arguments()
    overrides = [options.recipe, *options.overrides]
    config = parse_command_line(RECIPES, overrides, description="Checked before submission.")
    run_dir = Path(config.run_dir).absolute()
    script = render(options, run_dir)
    if options.dry_run:
        print(script, end="")
        return
    if shutil.which("sbatch") is None:
        sys.exit("error: no sbatch here: run this on a SLURM login node, or with --dry-run")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)  # SLURM does not make it for --output
    path = run_dir / "pretrain.sbatch"
    path.write_text(script)
    sys.exit(subprocess.run(["sbatch", str(path)]).returncode)


if __name__ == "__main__":
    main()
