"""The configuration of a run: what it refuses, and that every recipe is complete."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megacomposer.config.cli import parse_command_line
from megacomposer.data.config import DataConfig, DataSource
from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.config import ScheduleConfig
from megacomposer.recipes.pretrain import RECIPES, tiny
from megacomposer.train.config import LoopConfig, RunConfig

LOOP = LoopConfig(num_steps=10, micro_batch_size=2, global_batch_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, r"train\.num_steps is 0; it must be >= 1"),
        ({"micro_batch_size": 0}, r"train\.micro_batch_size is 0"),
        ({"global_batch_size": -8}, r"train\.global_batch_size is -8"),
        ({"global_batch_size": 9}, r"global_batch_size 9 is not a multiple of .*_size 2"),
        ({"stop_after_steps": -1}, r"train\.stop_after_steps is -1; it must be >= 0"),
        ({"eval_interval_steps": -5}, r"train\.eval_interval_steps is -5"),
        ({"eval_sequences": -1}, r"train\.eval_sequences is -1"),
        ({"max_skipped_steps": -1}, r"train\.max_skipped_steps is -1"),
        ({"completion_tokens": -1}, r"train\.completion_tokens is -1"),
    ],
)
def test_impossible_loop_is_accepted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LOOP, **change)


def test_evaluation_without_held_out_data_is_found_at_its_first_interval() -> None:
    data = DataConfig(sources=(DataSource(prefix="a"),), seq_length=32)
    with pytest.raises(ValueError, match=r"eval_interval_steps needs data\.heldout_prefix"):
        dataclasses.replace(tiny(), data=data)


def test_completion_under_context_parallelism_fails_after_the_whole_training() -> None:
    with pytest.raises(ValueError, match=r"completion_prompt needs mesh\.cp 1, and it is 2"):
        dataclasses.replace(tiny(), mesh=MeshConfig(cp=2))
    quiet = dataclasses.replace(tiny().train, completion_prompt="")
    assert dataclasses.replace(tiny(), mesh=MeshConfig(cp=2), train=quiet).mesh.cp == 2


def test_clip_that_query_and_key_norms_cancel_is_found_after_the_model_was_built() -> None:
    optim = dataclasses.replace(tiny().optim, qk_clip_threshold=100.0)
    normed = dataclasses.replace(tiny().model, attention="gqa", qk_norm=True)
    with pytest.raises(ValueError, match=r"qk_clip_threshold is for models without model\.qk_norm"):
        dataclasses.replace(tiny(), optim=optim, model=normed)
    assert dataclasses.replace(tiny(), optim=optim).optim.qk_clip_threshold == 100.0


def test_warm_up_longer_than_the_run_is_found_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        dataclasses.replace(tiny(), schedule=ScheduleConfig(kind="cosine", warmup_steps=241))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_loses_a_setting_on_its_way_through_config_json(name: str) -> None:
    config = RECIPES[name]()
    restored = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert restored.fingerprint() == config.fingerprint()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_cannot_be_overridden_in_every_section(name: str) -> None:
    overrides = {
        "run_dir": "elsewhere",
        "model.dtype": "fp32",
        "model.recompute": "full",
        "data.seq_length": "64",
        "train.num_steps": "5000",
        "train.completion_prompt": "",
        "optim.lr": "0.0125",
        "schedule.min_lr_frac": "0.25",
        "mesh.tp": "2",
        "runtime.seed": "7",
        "checkpoint.save_interval_steps": "3",
        "observe.log_interval_steps": "2",
    }
    argv = [word for option, value in overrides.items() for word in (f"--{option}", value)]
    config = parse_command_line(RECIPES, [name, *argv], description="test")
    for option, value in overrides.items():
        found: Any = config
        for part in option.split("."):
            found = getattr(found, part)
        assert str(found) == value, option
    changed = {line.partition(":")[0] for line in RECIPES[name]().diff(config)}
    assert changed <= set(overrides)


def test_recipe_does_not_train_with_muon() -> None:
    assert {recipe().optim.name for recipe in RECIPES.values()} == {"muon"}


def test_recipes_write_into_one_directory() -> None:
    directories = [recipe().run_dir for recipe in RECIPES.values()]
    assert len(set(directories)) == len(directories)
