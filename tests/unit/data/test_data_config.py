"""Settings of the data room."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megacomposer.data.config import (
    DataConfig,
    DataSource,
    DedupConfig,
    FileRules,
    FimConfig,
    PrepareConfig,
)

A, B = DataSource(prefix="a"), DataSource(prefix="b", weight=2.5)


def test_configs_survive_json():
    data = DataConfig(sources=(A, B), seq_length=128, heldout_prefix="h", seed=3, prefetch=False)
    assert DataConfig.from_dict(data.to_dict()) == data
    prepared = PrepareConfig(out="o", repo=("x", "y"), fim=FimConfig(rate=0.5))
    assert PrepareConfig.from_dict(prepared.to_dict()) == prepared


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (DataSource, {"prefix": ""}, "prefix is empty"),
        (DataSource, {"prefix": "a", "weight": 0.0}, "weight of a is 0"),
        (DataSource, {"prefix": "a", "weight": float("nan")}, "weight of a is nan"),
        (DataConfig, {"sources": (), "seq_length": 8}, "sources is empty"),
        (DataConfig, {"sources": (A, A), "seq_length": 8}, "names a twice"),
        (DataConfig, {"sources": (A,), "seq_length": 1}, "seq_length is 1"),
        (
            DataConfig,
            {"sources": (A,), "seq_length": 8, "heldout_prefix": "a"},
            "heldout_prefix a is also",
        ),
        (FileRules, {"extensions": ("py",)}, "with its dot"),
        (FileRules, {"max_file_bytes": 0}, "max_file_bytes is 0"),
        (DedupConfig, {"threshold": 0.0}, "threshold is 0"),
        (DedupConfig, {"bands": 129}, "bands is 129"),
        (DedupConfig, {"shingle_words": 0}, "shingle_words is 0"),
        (FimConfig, {"rate": 1.5}, "rate is 1.5"),
        (PrepareConfig, {"out": "o"}, "nothing to read"),
        (PrepareConfig, {"out": "", "source": "stdlib"}, "out is empty"),
        (PrepareConfig, {"out": "o", "source": "stdlib", "heldout_frac": 1.0}, "heldout_frac is 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_preparing_data_needs_no_torch():
    """A CPU node without torch prepares data, and --help answers at once."""
    code = "import sys, megacomposer.data.prepare; print([m for m in sys.modules if m == 'torch'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.strip() == "[]"
