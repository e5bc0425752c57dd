"""Wrong input to scripts/train.py: one clear line, exit code not 0, nothing harmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch_train import train, write_config
from small_run import write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A configuration and a run of two steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, write_corpus(folder))
    code, output = train(config, folder / "run", "--train.num_steps", "2", ranks=1)
    assert code == 0, output
    return config, folder / "run"


def refusal(config: Path, run_dir: Path, *overrides: str, ranks: int = 1) -> str:
    """The one error line of a run that must fail."""
    code, output = train(config, run_dir, *overrides, ranks=ranks)
    assert code != 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def tree(folder: Path) -> dict[str, bytes]:
    ignored = {"logs", ".lock"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not ignored & set(path.relative_to(folder).parts)
    }


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("--mesh.tp", "3"), ("impossible layout", "tp 3", "world of 1")),
        (("--mesh.ep", "4"), ("impossible layout", "ep 4", "world of 1")),
        (("--data.seq_lenght", "64"), ("--data.seq_lenght", "--data.seq_length")),
        (("--data.sources.0.prefix", "nowhere/train"), ("nowhere/train", ".idx")),
        (("--train.micro_batch_size", "3"), ("global_batch_size 8", "micro_batch_size 3")),
        (("--model.vocab_size", "100"), ("--model.vocab_size 264",)),
    ],
    ids=["tp", "ep", "unknown field", "missing data", "batch", "vocabulary"],
)
def test_a_wrong_setting_is_named_with_its_remedy(trained, tmp_path, overrides, words) -> None:
    config, _ = trained
    line = refusal(config, tmp_path / "run", *overrides)
    for word in words:
        assert word in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_half_written_dataset_is_refused(trained, tmp_path) -> None:
    config, _ = trained
    prefix = write_corpus(tmp_path)
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-16])
    line = refusal(config, tmp_path / "run", "--data.sources.0.prefix", str(prefix))
    assert str(index) in line
    index.unlink()
    line = refusal(config, tmp_path / "run", "--data.sources.0.prefix", str(prefix))
    assert f"{prefix}.bin has no train.idx" in line


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(trained) -> None:
    config, run_dir = trained
    before = tree(run_dir)
    line = refusal(config, run_dir, "--train.num_steps", "3", "--model.hidden_size", "32")
    assert "another model" in line or "model" in line
    assert "hidden_size" in line
    assert tree(run_dir) == before


def test_a_corrupt_checkpoint_is_refused_by_file(trained, tmp_path) -> None:
    config, _ = trained
    code, output = train(config, tmp_path, "--train.num_steps", "2", ranks=1)
    assert code == 0, output
    (shard,) = (tmp_path / "checkpoints" / "step_00000002").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = tree(tmp_path)
    line = refusal(config, tmp_path, "--train.num_steps", "3")
    assert shard.name in line
    assert tree(tmp_path) == before


def test_changed_data_is_refused_on_resume(trained, tmp_path) -> None:
    config, run_dir = trained
    other = write_corpus(tmp_path, seed=8)
    line = refusal(config, run_dir, "--train.num_steps", "3", "--data.sources.0.prefix", str(other))
    assert "data" in line
