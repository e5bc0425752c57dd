from __future__ import annotations

import subprocess
import sys

import pytest

from megacomposer.optim.config import OptimConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1.0),
        ("lr", float("inf")),
        ("weight_decay", -0.1),
        ("clip_grad_norm", float("nan")),
        ("qk_clip_threshold", -100.0),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.5),
        ("adam_eps", 0.0),
        ("muon_momentum", 1.0),
        ("muon_ns_steps", 0),
        ("muon_ns_steps", 6),
        ("muon_adam_lr_multiplier", -1.0),
        ("router_lr_multiplier", float("nan")),
        ("muon_bucket_mib", 0.0),
        ("muon_bucket_mib", float("inf")),
        ("muon_buffers", 0),
    ],
)
def test_nonsense_optimizer_setting_is_accepted(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        OptimConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("warmup_steps", -1),
        ("min_lr_frac", 1.5),
        ("wsd_decay_frac", 0.0),
        ("wsd_decay_frac", 1.1),
    ],
)
def test_nonsense_schedule_setting_is_accepted(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ScheduleConfig(**{field: value})


def test_repeating_set_is_limited_to_five_steps() -> None:
    assert OptimConfig(muon_ns_coefficients="kj", muon_ns_steps=8).muon_ns_steps == 8


def test_config_is_lost_in_a_round_trip() -> None:
    config = OptimConfig(name="muon_reference", lr=1e-3, muon_scale="spectral", clip_grad_norm=0.0)
    assert OptimConfig.from_dict(config.to_dict()) == config
    schedule = ScheduleConfig(kind="wsd", warmup_steps=7, wsd_decay_shape="linear")
    assert ScheduleConfig.from_dict(schedule.to_dict()) == schedule


def test_config_or_schedule_imports_torch() -> None:
    code = (
        "import sys, megacomposer.optim.config, megacomposer.optim.schedule; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
