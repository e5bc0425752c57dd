from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megacomposer.checkpoint.config import CheckpointConfig


def test_the_config_comes_back_equal_from_its_dictionary() -> None:
    config = CheckpointConfig(keep_last=5, load_from=Path("runs/base"), load_model_only=True)
    assert CheckpointConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", ["save_interval_steps", "keep_last"])
def test_a_negative_count_is_refused_by_name(name) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint\.{name} is -1"):
        CheckpointConfig(**{name: -1})


def test_weights_alone_need_a_checkpoint_to_come_from() -> None:
    with pytest.raises(ValueError, match=r"needs checkpoint\.load_from"):
        CheckpointConfig(load_model_only=True)


def test_help_is_not_kept_waiting_by_torch() -> None:
    program = "import megacomposer.checkpoint.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
