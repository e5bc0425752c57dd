"""From files to a dataset: the pipeline as a whole, its script, and its failures."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacomposer.data.config import DataConfig, DataSource, FilterConfig, FimConfig, PrepareConfig
from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.loader import build_loader
from megacomposer.data.manifest import data_fingerprint, read_manifest
from megacomposer.data.prepare import is_heldout, prepare
from megacomposer.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/prepare_data.py"
GITLAB_KEY = "glp" + "at-q8Zr2LxV5tYw9KpB3nGd"
SIZES = {"global_batch_size": 2, "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}


def code(name: int) -> str:
    return "".join(f"def f_{name}_{k}(x):\n    return x + {name * k}\n" for k in range(20))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """40 different files, a copy, a near copy, a binary, and a file with a key."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    for k in range(40):
        (root / f"sub/m{k:02}.py").write_text(code(k))
    (root / "sub/n_copy.py").write_text(code(3))
    (root / "sub/o_near.py").write_text(code(4) + "done = 1\n")
    (root / "sub/p.py").write_bytes(b"\0\1\2")
    (root / "sub/q.py").write_text(f"key = '{GITLAB_KEY}'\n")
    (root / "notes.dat").write_bytes(b"1")
    return root


def config(tree: Path, out: Path, **settings) -> PrepareConfig:
    return PrepareConfig(**{"out": str(out), "repo": (str(tree),), "heldout_frac": 0.2} | settings)


def texts(prefix: Path) -> list[bytes]:
    tokenizer, dataset = ByteTokenizer(), IndexedDataset(prefix)
    ids = [dataset.tokens(k) for k in range(len(dataset))]
    assert all(document[-1] == tokenizer.eod_id for document in ids)
    assert all((document[:-1] < 256).all() for document in ids)
    return [tokenizer.decode_bytes(document) for document in ids]


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(directory.iterdir())}


def test_every_file_ends_in_one_split_or_in_the_funnel(tree, tmp_path):
    out = tmp_path / "out"
    summary = prepare(config(tree, out))
    assert sorted(p.name for p in out.iterdir()) == [
        "dataset.json",
        "heldout.bin",
        "heldout.idx",
        "train.bin",
        "train.idx",
    ]
    assert summary["event"] == "prepare_data"
    assert summary["status"] == "written"
    counts = {name: row["files"] for name, row in summary["funnel"].items()}
    assert counts == {
        "seen": 45,
        "extension": 1,
        "binary": 1,
        "redacted:gitlab_token": 1,
        "duplicate": 1,
        "near_duplicate": 1,
    }
    splits = {name: texts(out / name) for name in ("train", "heldout")}
    everything = splits["train"] + splits["heldout"]
    assert sorted(everything) == sorted(
        [code(k).encode() for k in range(40)] + [b"key = 'REDACTED_gitlab_token'\n"]
    )
    for name, documents in splits.items():
        assert documents
        assert summary["splits"][name] == {
            "documents": len(documents),
            "text_bytes": sum(map(len, documents)),
            "tokens": sum(map(len, documents)) + len(documents),
        }
        expected = [
            code(k).encode()
            for k in range(40)
            if is_heldout(f"tree/sub/m{k:02}.py", seed=0, heldout_frac=0.2) == (name == "heldout")
        ]
        assert [text for text in documents if b"key" not in text] == expected


def test_the_split_goes_by_name_and_seed_so_growth_moves_no_file():
    keys = [f"r/{k}.py" for k in range(4000)]
    held = {key for key in keys if is_heldout(key, seed=0, heldout_frac=0.1)}
    assert abs(len(held) / 4000 - 0.1) < 0.02
    assert held < {key for key in keys if is_heldout(key, seed=0, heldout_frac=0.2)}
    assert held != {key for key in keys if is_heldout(key, seed=1, heldout_frac=0.1)}
    assert not any(is_heldout(key, seed=0, heldout_frac=0.0) for key in keys)


def test_manifest_has_sizes_checksums_and_counts(tree, tmp_path):
    out = tmp_path / "out"
    summary = prepare(config(tree, out, seed=5))
    manifest = json.loads((out / "dataset.json").read_text())
    assert manifest == read_manifest(out)
    assert manifest["seed"] == 5
    assert manifest["tokenizer"]["spec"] == "byte"
    assert manifest["splits"] == summary["splits"]
    assert len(manifest["files"]) == 4
    for name, entry in manifest["files"].items():
        raw = (out / name).read_bytes()
        assert entry == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    assert str(tmp_path) not in (out / "dataset.json").read_text()


def test_the_same_inputs_give_the_same_bytes_in_another_place(tree, tmp_path):
    prepare(config(tree, tmp_path / "one"))
    moved = tmp_path / "elsewhere/tree"
    moved.parent.mkdir()
    tree.rename(moved)
    prepare(config(moved, tmp_path / "two"))
    for name in ("train.bin", "train.idx", "heldout.bin", "heldout.idx", "dataset.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_running_again_writes_nothing_and_force_rebuilds(tree, tmp_path):
    out = tmp_path / "out"
    first = prepare(config(tree, out))
    before = snapshot(out)
    again = prepare(config(tree, out))
    assert again["status"] == "up_to_date"
    assert snapshot(out) == before
    assert {**again, "seconds": 0, "status": ""} == {**first, "seconds": 0, "status": ""}
    forced = prepare(config(tree, out, force=True))
    assert forced["status"] == "written"
    after = snapshot(out)
    assert {n: raw for n, (raw, _) in after.items()} == {n: raw for n, (raw, _) in before.items()}
    assert after["train.bin"][1] != before["train.bin"][1]


def test_other_inputs_are_refused_unless_forced(tree, tmp_path):
    out = tmp_path / "out"
    prepare(config(tree, out))
    before = snapshot(out)
    with pytest.raises(ValueError, match=r"other inputs or settings.*--force"):
        prepare(config(tree, out, seed=1))
    (tree / "sub/m00.py").write_text("changed = True\n")
    with pytest.raises(ValueError, match="other inputs or settings"):
        prepare(config(tree, out))
    assert snapshot(out) == before
    assert prepare(config(tree, out, force=True))["status"] == "written"
    assert b"changed = True\n" in texts(out / "train") + texts(out / "heldout")


def test_a_dataset_that_is_not_ours_is_not_overwritten(tree, tmp_path):
    out = tmp_path / "out"
    prepare(config(tree, out))
    (out / "dataset.json").unlink()
    with pytest.raises(ValueError, match=r"train\.idx exists without a dataset\.json"):
        prepare(config(tree, out))
    prepare(config(tree, out, force=True))


def test_without_a_heldout_share_an_old_heldout_set_does_not_stay(tree, tmp_path):
    out = tmp_path / "out"
    prepare(config(tree, out))
    summary = prepare(config(tree, out, heldout_frac=0.0, force=True))
    assert list(summary["splits"]) == ["train"]
    assert sorted(p.name for p in out.iterdir()) == ["dataset.json", "train.bin", "train.idx"]


def test_changed_files_are_noticed_on_the_next_run_and_by_the_loader(tree, tmp_path):
    out = tmp_path / "out"
    prepare(config(tree, out))
    data = DataConfig(sources=(DataSource(prefix=str(out / "train")),), seq_length=64)
    build_loader(data, **SIZES).close()
    raw = bytearray((out / "train.bin").read_bytes())
    raw[100] ^= 1
    (out / "train.bin").write_bytes(raw)
    with pytest.raises(ValueError, match=r"train\.bin does not have the SHA-256"):
        prepare(config(tree, out))
    (out / "train.bin").write_bytes(raw[:-2])
    with pytest.raises(ValueError, match=rf"train\.bin has {len(raw) - 2} bytes, dataset\.json"):
        build_loader(data, **SIZES)


def test_a_kill_while_files_are_replaced_is_refused_and_repaired(tree, tmp_path):
    out = tmp_path / "out"
    prepare(config(tree, out))
    # the state between the first rename and the last
    (out / "dataset.json").rename(out / "dataset.json.incomplete")
    data = DataConfig(sources=(DataSource(prefix=str(out / "train")),), seq_length=64)
    prepare(config(tree, tmp_path / "whole"))
    sources = (DataSource(prefix=str(tmp_path / "whole/train")),)
    mixed = DataConfig(sources=sources, heldout_prefix=str(out / "heldout"), seq_length=64)
    with pytest.raises(ValueError, match="was being replaced when its writer stopped"):
        build_loader(mixed, **SIZES)
    with pytest.raises(ValueError, match="was being replaced when its writer stopped"):
        build_loader(data, **SIZES)
    assert prepare(config(tree, out))["status"] == "written"
    assert not (out / "dataset.json.incomplete").exists()
    build_loader(data, **SIZES).close()


def test_two_writers_of_one_directory_do_not_mix(tree, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is preparing"):
        prepare(config(tree, out))
    os.close(descriptor)
    prepare(config(tree, out))


def test_fingerprint_follows_the_content_not_the_place(tree, tmp_path):
    prepare(config(tree, tmp_path / "one"))
    prepare(config(tree, tmp_path / "two"))
    prepare(config(tree, tmp_path / "three", seed=1))
    marks = [data_fingerprint(str(tmp_path / n / "train")) for n in ("one", "two", "three")]
    assert marks[0] == marks[1] != marks[2]


def test_data_of_another_tokenizer_is_refused(tree, tmp_path, tokenizer_json):
    path = tokenizer_json()
    out = tmp_path / "out"
    summary = prepare(config(tree, out, tokenizer=path))
    assert summary["splits"]["train"]["tokens"] < summary["splits"]["train"]["text_bytes"]
    sources = (DataSource(prefix=str(out / "train")),)
    build_loader(DataConfig(sources=sources, seq_length=64, tokenizer=path), **SIZES).close()
    with pytest.raises(ValueError, match=r"was made with tokenizer .*tokenizer\.json"):
        build_loader(DataConfig(sources=sources, seq_length=64), **SIZES)


def test_text_that_a_tokenizer_cannot_take_is_counted(tree, tmp_path, tokenizer_json):
    (tree / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tree / "forged.py").write_text("stop = '<|fim_prefix|>'\n")
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    path = tokenizer_json(added=names)  # not special: the library turns the text into the id
    summary = prepare(config(tree, tmp_path / "out", tokenizer=path))
    counts = {name: row["files"] for name, row in summary["funnel"].items()}
    assert counts["not_utf8"] == 1
    assert counts["control_token_in_text"] == 1


def test_fill_in_the_middle_changes_training_documents_only(tree, tmp_path):
    prepare(config(tree, tmp_path / "plain"))
    prepare(config(tree, tmp_path / "fim", fim=FimConfig(rate=1.0)))
    tokenizer = ByteTokenizer()
    plain, fim = (IndexedDataset(tmp_path / name / "train") for name in ("plain", "fim"))
    assert len(plain) == len(fim)
    for k in range(len(fim)):
        ids = fim.tokens(k)
        assert ids[0] == tokenizer.fim_ids.prefix
        assert ids[-1] == tokenizer.eod_id
        assert sorted(tokenizer.decode(ids)) == sorted(tokenizer.decode(plain.tokens(k)))
        assert len(ids) == len(plain.tokens(k)) + 3
    held = [(tmp_path / name / "heldout.bin").read_bytes() for name in ("plain", "fim")]
    assert held[0] == held[1]


def test_fill_in_the_middle_needs_its_tokens(tree, tmp_path, tokenizer_json):
    settings = {"tokenizer": tokenizer_json(), "fim": FimConfig(rate=0.5)}
    with pytest.raises(ValueError, match="no fill-in-the-middle tokens"):
        prepare(config(tree, tmp_path / "out", **settings))


def test_two_trees_of_one_name_stay_apart(tree, tmp_path):
    other = tmp_path / "other/tree"
    other.mkdir(parents=True)
    (other / "a.py").write_text("x = 'another tree'\n")
    summary = prepare(config(tree, tmp_path / "out", repo=(str(tree), str(other))))
    assert summary["funnel"]["seen"]["files"] == 46


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heldout_frac": 1e-9}, "no document for heldout"),
        ({"filters": FilterConfig(licenses=("MIT",))}, r"left no document.*license:NOASSERTION 4"),
    ],
)
def test_nothing_left_is_an_error_with_the_funnel_and_no_files(tree, tmp_path, settings, message):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        prepare(config(tree, out, **settings))
    assert list(out.iterdir()) == []


def run_script(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Runs the script after the statement `before` in the same process."""
    run = f"{before}; import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", run, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_script_ends_with_one_json_line_and_takes_several_trees(tree, tmp_path):
    other = tmp_path / "second"
    other.mkdir()
    (other / "a.py").write_text("x = 'another tree'\n")
    out = tmp_path / "out"
    arguments = ("--repo", str(tree), "--repo", str(other), "--out", str(out))
    result = run_script(*arguments, "--heldout_frac", "0.2")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["event"] == "prepare_data"
    assert summary["funnel"]["seen"]["files"] == 46
    again = run_script(*arguments, "--heldout-frac", "0.2")
    assert "up to date" in again.stdout
    assert json.loads(again.stdout.splitlines()[-1])["status"] == "up_to_date"


def test_script_reports_an_empty_corpus_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    result = run_script("--repo", str(tmp_path / "empty"), "--out", str(tmp_path / "out"))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: no document in {tmp_path / 'empty'}; files by rule: no file at all"
    ]


@pytest.mark.parametrize(
    ("limit_bytes", "heldout_frac", "name"),
    [(4096, 0.1, "train.bin"), (20_000, 0.8, "heldout.bin")],
)
def test_a_full_disk_is_one_line_that_names_the_file_and_the_old_dataset_stays(
    tree, tmp_path, limit_bytes, heldout_frac, name
):
    out = tmp_path / "out"
    prepare(config(tree, out))
    before = snapshot(out)
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes},) * 2)"
    arguments = ("--repo", str(tree), "--out", str(out), "--heldout_frac", str(heldout_frac))
    result = run_script(*arguments, "--force", before=limit)
    assert result.returncode == 1
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error")]
    assert f"cannot write {out / name}: File too large; free space" in line
    assert "Traceback" not in result.stderr
    assert snapshot(out) == before


KILL = (
    "import os, signal, itertools; real, calls = os.fsync, itertools.count(1); "
    "os.fsync = lambda fd: "
    "os.kill(os.getpid(), signal.SIGKILL) if next(calls) == {} else real(fd)"
)
SYNCS = 13
"""Calls of fsync in one build: five files, and the directory after each change in it."""


@pytest.mark.parametrize("at", range(1, SYNCS + 2))
def test_a_kill_at_any_moment_leaves_the_old_dataset_the_new_one_or_a_refusal(tree, tmp_path, at):
    out = tmp_path / "out"
    prepare(config(tree, out))
    old = snapshot(out)
    (tree / "sub/m00.py").write_text("changed = True\n")
    new = tmp_path / "new"
    prepare(config(tree, new))
    whole = [{name: raw for name, (raw, _) in files.items()} for files in (old, snapshot(new))]
    arguments = ("--repo", str(tree), "--out", str(out), "--heldout_frac", "0.2")
    result = run_script(*arguments, "--force", before=KILL.format(at))
    assert result.returncode == (-9 if at <= SYNCS else 0), result.stderr

    files = {name: (out / name).read_bytes() for name in whole[0] if (out / name).exists()}
    data = DataConfig(sources=(DataSource(prefix=str(out / "train")),), seq_length=64)
    if files in whole:
        build_loader(data, **SIZES).close()
    else:
        with pytest.raises(ValueError, match=r"was being replaced|has no train\.idx"):
            build_loader(data, **SIZES)
    # the same command again, and all is well
    result = run_script(*arguments, "--force")
    assert result.returncode == 0, result.stderr
    assert {name: raw for name, (raw, _) in snapshot(out).items()} == whole[1]
