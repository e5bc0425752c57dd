"""parse_command_line: what users type, and what they read when it is wrong."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest

from megacomposer.config import Config
from megacomposer.config.cli import parse_command_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Config):
    lr: float = 0.02
    """Step size of the hidden matrices."""
    ns_steps: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Config):
    beta: float = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim(Config):
    lr: float = 1e-3
    """Peak learning rate."""
    clip: float | None = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    widths: tuple[int, ...] = (1, 2)
    kind: Literal["muon", "adamw"] = "muon"
    fused_step: bool = True
    verbose: bool = False
    check: bool | None = None
    inner: Muon | Adam = Muon()
    absent: Muon | None = None
    stages: tuple[Muon, ...] = (Muon(), Muon())

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr};\n\n- see " + "x" * 120)
        if self.betas[0] > self.betas[1]:
            raise ValueError("optim.betas must ascend")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Config):
    name: str
    path: Path | None = None
    scale: dict[str, float] = dataclasses.field(default_factory=dict)
    optim: Optim = Optim()
    """The optimizer."""


def tiny() -> Run:
    """A tiny run.

    Not part of the listing.
    """
    return Run(name="tiny")


def two_stage() -> Run:
    """A run in two stages."""
    return Run(name="two", optim=Optim(inner=Adam()))


def broken() -> Run:
    return Run(name="broken", optim=Optim(lr=-1.0))


RECIPES = {"tiny": tiny, "two-stage": two_stage, "broken": broken}


def parse(line: str) -> Run:
    return parse_command_line(RECIPES, line.split(), description="Trains a model.")


def set_optim(**changes: object) -> Run:
    return Run(name="tiny", optim=dataclasses.replace(Optim(), **changes))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Run(name="tiny")),
        ("--optim.lr 3e-4", set_optim(lr=3e-4)),
        ("--optim.lr=3e-4", set_optim(lr=3e-4)),
        ("--optim.lr 5", set_optim(lr=5.0)),
        ("--optim.clip None", set_optim(clip=None)),
        ("--optim.betas 0.8 0.9", set_optim(betas=(0.8, 0.9))),
        ("--optim.widths 7", set_optim(widths=(7,))),
        ("--optim.widths", set_optim(widths=())),
        ("--optim.widths 3 4 5 --optim.lr 2", set_optim(widths=(3, 4, 5), lr=2.0)),
        ("--optim.kind adamw", set_optim(kind="adamw")),
        ("--optim.no-fused-step", set_optim(fused_step=False)),
        ("--optim.no_fused_step", set_optim(fused_step=False)),
        ("--optim.fused_step False", set_optim(fused_step=False)),
        ("--optim.fused-step=false", set_optim(fused_step=False)),
        ("--optim.fused-step True", Run(name="tiny")),
        ("--optim.verbose", set_optim(verbose=True)),
        ("--optim.verbose True --optim.lr 2", set_optim(verbose=True, lr=2.0)),
        ("--optim.verbose=True", set_optim(verbose=True)),
        ("--optim.check False", set_optim(check=False)),
        ("--optim.inner.ns-steps 6", set_optim(inner=Muon(ns_steps=6))),
        ("--optim.inner.ns_steps 6", set_optim(inner=Muon(ns_steps=6))),
        ("--optim.stages.1.lr 1", set_optim(stages=(Muon(), Muon(lr=1.0)))),
        ("--path a/b", Run(name="tiny", path=Path("a/b"))),
        ("--scale a 1 b 2.5", Run(name="tiny", scale={"a": 1.0, "b": 2.5})),
        ("--name False", Run(name="False")),
    ],
)
def test_override_that_sets_something_else(line: str, expected: Run) -> None:
    assert parse(f"tiny {line}") == expected


def test_recipe_whose_kind_of_optimizer_is_replaced_by_the_default_kind() -> None:
    assert parse("two_stage --optim.inner.beta 0.5").optim.inner == Adam(beta=0.5)


def test_dumped_config_that_does_not_run_again(tmp_path: Path) -> None:
    dumped = Run(name="dumped", optim=Optim(inner=Adam(beta=0.1), clip=None))
    dumped.save(tmp_path / "config.json")
    assert parse(f"--config {tmp_path}/config.json") == dumped
    changed = parse(f"--config={tmp_path}/config.json --optim.lr 2")
    assert changed == dataclasses.replace(dumped, optim=dataclasses.replace(dumped.optim, lr=2.0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "tinny",
            "unknown recipe 'tinny'; did you mean tiny? (recipes: tiny, two-stage, broken)",
        ),
        ("--optim.lr 1", "the first argument is a recipe or --config, got '--optim.lr'"),
        ("tiny --optim.lrr 3", "unknown option --optim.lrr; did you mean --optim.lr?"),
        ("tiny --optm.lr=3", "unknown option --optm.lr; did you mean --optim.lr?"),
        ("tiny --ns-steps 3", "unknown option --ns_steps; did you mean --optim.inner.ns_steps"),
        ("tiny --optim.absent.lr 3", "--optim.absent.lr: optim.absent is None in this recipe"),
        ("tiny --optim.no-fused False", "unknown option --optim.no_fused; did you mean"),
        ("tiny stray", "unexpected argument 'stray'; an override is --section.field value"),
        ("tiny --optim.verbose maybe", "unexpected argument 'maybe'"),
        ("tiny --optim.verbose=maybe", "--optim.verbose: expected True or False, got 'maybe'"),
        ("tiny --optim.lr abc", "error: --optim.lr: could not convert string to float: 'abc'"),
        ("tiny --optim.lr", "Missing value for argument*--optim.lr*Expected 1 values."),
        ("tiny --optim.betas 1", "Missing value for argument*--optim.betas*Expected 2 values."),
        ("tiny --optim.kind sgd", "error: invalid choice 'sgd' for argument '--optim.kind'"),
        ("tiny --optim.lr -1", "error: optim: lr must be positive, got -1.0; - see " + "x" * 120),
        ("tiny --optim.betas 2 1", "error: optim.betas must ascend"),
        ("broken", "error: lr must be positive, got -1.0"),
        ("--config", "--config needs the path of a config.json"),
        ("--config nowhere.json", "cannot read config nowhere.json: No such file"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # tyro draws other frames for each
def test_mistake_that_is_answered_with_a_traceback_or_a_riddle(
    line: str,
    message: str,
    encoding: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    with pytest.raises(SystemExit) as stop:
        parse(line)
    sys.stdout.flush()
    printed = capsys.readouterr().err
    assert stop.value.code == 2
    assert output.getvalue() == b""
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert printed.isascii()
    for part in message.split("*"):
        assert part in printed


def test_command_without_arguments_that_does_not_say_what_can_be_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("")
    printed = capsys.readouterr().err
    assert stop.value.code == 2
    assert "  tiny       A tiny run.\n" in printed
    assert "  two-stage  A run in two stages.\n" in printed
    assert "Not part of the listing" not in printed


def test_help_that_does_not_list_recipes_or_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "A run in two stages." in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        parse("two-stage --help")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for part in (
        "Trains a model.",
        "--optim.lr FLOAT",
        "Peak learning rate.",
        "--optim.inner.beta",
        "--optim.no_fused_step",
    ):
        assert part in printed
    assert "--optim.inner.ns_steps" not in printed


def test_parsing_that_imports_torch_and_makes_help_slow(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys

            import megacomposer.config.cli
            from megacomposer.observe.config import ObserveConfig

            assert "tyro" not in sys.modules
            config = megacomposer.config.cli.parse_command_line(
                {"plain": ObserveConfig}, ["plain", "--log-interval-steps", "7"], description="d"
            )
            assert config.log_interval_steps == 7
            print(sorted({"torch", "numpy", "triton"} & set(sys.modules)))
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
