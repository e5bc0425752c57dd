"""Config: JSON and back, and what is said about input that does not fit."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from megacomposer.config import Config


class Precision(enum.Enum):
    BF16 = "bf16"
    FP32 = "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Config):
    lr: float = 0.02
    ns_steps: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Config):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(Config):
    name: Literal["cosine"] = "cosine"
    steps: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Config):
    name: Literal["linear"] = "linear"
    steps: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin(Config):
    steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherTwin(Config):
    steps: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Config):
    name: str
    seed: int = 0
    resume: bool = False
    optim: Muon | Adam = Muon()
    schedule: Cosine | Linear | None = None
    twin: Twin | OtherTwin | None = None
    clip: float | None = 1.0
    width: int | str = 4
    number: float | int = 0.5
    precision: Precision = Precision.BF16
    mode: Literal["fast", "exact", 3] = "fast"
    data: Path = Path("data")
    blend: tuple[tuple[str, float], ...] = ()
    stages: list[Muon] = dataclasses.field(default_factory=list)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    by_layer: dict[int, Muon] = dataclasses.field(default_factory=dict)
    extra: Any = None
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        object.__setattr__(self, "derived", self.seed + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root(Config):
    run: Run


FULL = Run(
    name="a",
    seed=3,
    resume=True,
    optim=Adam(lr=0.5),
    schedule=Linear(steps=7),
    clip=math.inf,
    width="wide",
    precision=Precision.FP32,
    mode=3,
    data=Path("x/y"),
    blend=(("web", 0.25), ("code", 0.75)),
    stages=[Muon(), Muon(ns_steps=6)],
    ratios={"a": 1.0, "b": -math.inf},
    by_layer={-1: Muon(), 12: Muon(lr=1.0)},
    extra={"k": [1, None, True]},
)


@pytest.mark.parametrize("config", [Run(name="defaults"), FULL, Root(run=FULL)])
def test_config_that_loses_a_value_on_its_way_through_json(config: Config) -> None:
    text = json.dumps(config.to_dict(), allow_nan=False)
    restored = type(config).from_dict(json.loads(text))
    assert restored == config
    assert restored.to_dict() == config.to_dict()
    assert restored.fingerprint() == config.fingerprint()


def test_restored_values_that_keep_their_json_types() -> None:
    restored = Run.from_dict(json.loads(json.dumps(FULL.to_dict())))
    assert type(restored.blend) is tuple
    assert type(restored.blend[0]) is tuple
    assert type(restored.data) is type(Path())
    assert type(restored.optim) is Adam
    assert type(restored.schedule) is Linear
    assert restored.derived == 4
    assert type(Run.from_dict({"name": "a", "clip": 2}).clip) is float
    assert type(Run.from_dict({"name": "a", "number": 2}).number) is int
    assert type(Run.from_dict({"name": "a", "number": 2.0}).number) is float


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"name": "a", "optim": {"lr": 1.0, "ns_step": 5}}, ["optim", "Muon(lr, ns_steps)"]),
        ({"name": "a", "stages": [{"lrr": 1.0}]}, ["'stages[0].lrr'", "did you mean lr?"]),
        ({"name": "a", "sed": 1}, ["'sed'", "did you mean seed?"]),
        ({"name": "a", "zzzz": 1}, ["'zzzz'", "known: name, seed"]),
        ({"seed": 1}, ["missing", "'name'", "str"]),
        ({"name": 3}, ["name", "expected str", "int 3"]),
        ({"name": "a", "seed": True}, ["seed", "expected int", "bool True"]),
        ({"name": "a", "seed": 1.0}, ["seed", "expected int"]),
        ({"name": "a", "resume": 1}, ["resume", "expected bool"]),
        ({"name": "a", "clip": "big"}, ["clip", "expected float"]),
        ({"name": "a", "clip": False}, ["clip", "expected float"]),
        ({"name": "a", "width": None}, ["width", "int or str"]),
        ({"name": "a", "precision": "fp8"}, ["precision", "'bf16', 'fp32'"]),
        ({"name": "a", "mode": "slow"}, ["mode", "'fast', 'exact', 3"]),
        ({"name": "a", "mode": 3.0}, ["mode", "'fast', 'exact', 3", "float 3.0"]),
        ({"name": "a", "optim": {"lr": 1.0, "betas": [0.9]}}, ["optim.betas", "expected 2"]),
        ({"name": "a", "blend": [["web", "x"]]}, ["blend[0][1]", "expected float"]),
        ({"name": "a", "blend": "web"}, ["blend", "expected tuple"]),
        ({"name": "a", "ratios": {"k": "x"}}, ["ratios.k", "expected float"]),
        ({"name": "a", "ratios": [1.0]}, ["ratios", "expected dict"]),
        ({"name": "a", "by_layer": {"one": {}}}, ["by_layer key", "expected int"]),
        ({"name": "a", "by_layer": {"7": {"lr": "x"}}}, ["by_layer.7.lr", "expected float"]),
        ({"name": "a", "data": 1}, ["data", "expected Path"]),
        ({"name": "a", "optim": 1}, ["optim", "Muon or Adam"]),
        ({"name": "a", "seed": -1}, ["seed must be >= 0"]),
        ([], ["Run", "expected an object"]),
    ],
)
def test_bad_value_that_is_reported_without_its_place(data: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        Run.from_dict(data)
    for part in parts[1:]:
        assert part in str(caught.value)


def test_nested_error_that_loses_its_dotted_path() -> None:
    with pytest.raises(ValueError, match=r"^run: seed must be >= 0, got -1$"):
        Root.from_dict({"run": {"name": "a", "seed": -1}})
    with pytest.raises(ValueError, match=r"^top\.run\.seed: expected int, got str 'x'$"):
        Root.from_dict({"run": {"name": "a", "seed": "x"}}, where="top")


def test_union_members_that_cannot_be_told_apart_load_as_the_wrong_one() -> None:
    with pytest.raises(ValueError, match=r"twin: 2 of Twin\(steps\); OtherTwin\(steps\)"):
        Run.from_dict({"name": "a", "twin": {"steps": 1}})


def test_nan_that_makes_a_config_unequal_to_itself() -> None:
    with pytest.raises(ValueError, match=r"optim\.lr is NaN"):
        Run(name="a", optim=Muon(lr=math.nan)).to_dict()


def test_save_that_leaves_half_a_file_or_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "config.json"
    FULL.save(path)
    Run(name="second").save(path)
    assert Run.load(path) == Run(name="second")
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]
    assert path.read_text().startswith('{\n  "name": "second",\n')


def test_save_that_refuses_its_values_destroys_the_file_before_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    FULL.save(path)
    with pytest.raises(ValueError, match="NaN"):
        Run(name="a", clip=math.nan).save(path)
    assert Run.load(path) == FULL


def test_file_that_cannot_be_loaded_is_not_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    FULL.save(whole)
    cases = {
        "missing.json": None,
        "empty.json": b"",
        "half.json": whole.read_bytes()[:100],
        "binary.json": b"\xff\xfe\x00",
        "list.json": b"[1]",
        "unknown.json": b'{"name": "a", "sed": 1}',
    }
    for name, content in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=name) as caught:
            Run.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot read config"):
        Run.load(tmp_path)


def test_fingerprint_that_differs_for_equal_configs_or_agrees_for_unequal_ones() -> None:
    assert Muon(lr=1).fingerprint() == Muon(lr=1.0).fingerprint()
    reordered = Run(name="a", ratios={"y": 2.0, "x": 1.0})
    assert reordered.fingerprint() == Run(name="a", ratios={"x": 1.0, "y": 2.0}).fingerprint()
    assert Muon(lr=0.5).fingerprint() != Muon(lr=0.25).fingerprint()
    assert Run(name="a", width=4).fingerprint() != Run(name="a", width="4").fingerprint()
    assert len(FULL.fingerprint()) == 16
    int(FULL.fingerprint(), 16)


def test_fingerprint_that_changes_between_versions_orphans_every_checkpoint() -> None:
    # pinned: SHA-256 of {"lr":0.5,"ns_steps":5}
    assert Muon(lr=0.5).fingerprint() == "0802df019285cc00"


def test_diff_that_hides_or_invents_a_change() -> None:
    old = Root(run=Run(name="a", blend=(("web", 1.0),)))
    assert old.diff(Root(run=Run(name="a", blend=(("web", 1),)))) == []
    new = Root(
        run=dataclasses.replace(
            old.run, seed=2, clip=None, optim=Adam(lr=0.02), blend=(), ratios={"k": 1.0}
        )
    )
    assert old.diff(new) == [
        "run.seed: 0 -> 2",
        "run.optim.ns_steps: 5 -> (absent)",
        "run.clip: 1 -> null",
        'run.blend: [["web", 1]] -> []',
        "run.ratios: {} -> (absent)",
        "run.optim.betas: (absent) -> [0.9, 0.95]",
        "run.ratios.k: (absent) -> 1",
    ]
