"""The `.bin/.idx` writer and reader, alone and against megatron-core's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megacomposer.data.indexed import (
    IndexedDataset,
    IndexedWriter,
    encode_index,
    token_dtype,
)

DOCUMENTS = [np.array([7, 8]), np.array([1, 2, 3, 4, 5]), np.array([9])]


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16) -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


def test_index_bytes_are_those_of_the_format(tmp_path):
    """Off-by-one offsets went unnoticed in another writer: 3 documents of 2, 5, 1 tokens."""
    write(tmp_path / "d")
    golden = (
        "4d4d494449445800 00"  # magic
        "0100000000000000 08"  # version 1, uint16
        "0300000000000000 0400000000000000"  # sequences, boundaries
        "02000000 05000000 01000000"
        "0000000000000000 0400000000000000 0e00000000000000"  # offsets 0, 4, 14
        "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
    )
    assert (tmp_path / "d.idx").read_bytes() == bytes.fromhex(golden)
    assert (tmp_path / "d.bin").read_bytes() == bytes.fromhex("07000800 0100020003000400 0500 0900")
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def test_pieces_of_documents_read_back(tmp_path):
    write(tmp_path / "d")
    dataset = IndexedDataset(tmp_path / "d")
    assert len(dataset) == 3
    assert dataset.total_tokens == 8
    assert dataset.document_lengths.tolist() == [2, 5, 1]
    assert [dataset.tokens(k).tolist() for k in range(3)] == [d.tolist() for d in DOCUMENTS]
    assert dataset.tokens(1, 2, 2).tolist() == [3, 4]
    assert dataset.tokens(1, 5, 0).tolist() == []
    for arguments in ((3,), (-1,), (1, 4, 2), (0, -1, 1)):
        with pytest.raises(ValueError, match=r"of .*d, which has"):
            dataset.tokens(*arguments)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(264, np.uint16), (65_499, np.uint16), (65_500, np.int32)]
)
def test_dtype_is_the_one_megatron_chooses(vocab_size, dtype):
    from megatron.core.datasets.indexed_dataset import DType

    assert token_dtype(vocab_size) is dtype is DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_what_we_write(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    write(tmp_path / "d", dtype=dtype)
    theirs = MegatronDataset(str(tmp_path / "d"))
    assert [theirs[k].tolist() for k in range(len(theirs))] == [d.tolist() for d in DOCUMENTS]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert theirs.index.dtype is dtype


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_what_megatron_writes_also_with_several_sequences_a_document(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=dtype)
    builder.add_document(torch.tensor([7, 8]), [2])
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item(torch.tensor([4, 5]))
    builder.end_document()
    builder.add_document(torch.tensor([9]), [1])
    builder.finalize(str(tmp_path / "d.idx"))
    ours = IndexedDataset(tmp_path / "d")
    assert [ours.tokens(k).tolist() for k in range(len(ours))] == [d.tolist() for d in DOCUMENTS]
    write(tmp_path / "e", dtype=dtype)
    assert (tmp_path / "d.bin").read_bytes() == (tmp_path / "e.bin").read_bytes()


def test_offsets_beyond_2_to_the_31_bytes(tmp_path):
    """A sparse file: 3 documents of 2 GiB each, no data but one token in the last."""
    length = 1 << 29
    (tmp_path / "d.idx").write_bytes(encode_index(np.array([length] * 3), np.int32))
    with open(tmp_path / "d.bin", "wb") as file:
        file.truncate(3 * length * 4)
        file.seek(3 * length * 4 - 4)
        file.write((12345).to_bytes(4, "little"))
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.total_tokens == 3 * length
    assert dataset.tokens(2, length - 1, 1).tolist() == [12345]
    assert dataset.tokens(1, length - 1, 1).tolist() == [0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([], dtype=np.int64), "non-empty"),
        (np.array([[1, 2]]), "non-empty"),
        (np.array([70_000]), "do not fit uint16"),
        (np.array([-1]), "do not fit uint16"),
    ],
)
def test_tokens_that_would_wrap_are_refused_and_nothing_stays(tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "d", [np.array([1]), bad])
    assert os.listdir(tmp_path) == []


def test_a_dataset_without_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no documents"):
        write(tmp_path / "d", [])
    assert os.listdir(tmp_path) == []


def test_a_failed_rebuild_leaves_the_old_pair(tmp_path):
    write(tmp_path / "d")
    with pytest.raises(ValueError, match="do not fit"):
        write(tmp_path / "d", [np.array([1]), np.array([-5])])
    assert len(IndexedDataset(tmp_path / "d")) == 3
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"d\.idx does not exist"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d")
    (tmp_path / "d.bin").unlink()
    with pytest.raises(ValueError, match=r"d\.bin does not exist"):
        IndexedDataset(tmp_path / "d")


def test_a_bin_without_index_is_a_half_written_build(tmp_path):
    write(tmp_path / "d")
    (tmp_path / "d.idx").unlink()
    with pytest.raises(ValueError, match=r"d\.bin has no d\.idx.*did not finish.*prepare"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("keep", [0, 10, 33, 50, 101])
def test_a_truncated_index_is_refused(tmp_path, keep):
    write(tmp_path / "d")
    path = tmp_path / "d.idx"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"d\.idx is truncated"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize(("size", "word"), [(0, "truncated"), (14, "truncated"), (18, "too long")])
def test_a_bin_of_another_size_is_refused(tmp_path, size, word):
    write(tmp_path / "d")
    os.truncate(tmp_path / "d.bin", size)
    with pytest.raises(ValueError, match=rf"d\.bin is {word}: {size} bytes, .* says 16"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "dtype code 7"),
        (54, b"\x02", "prefix sum"),  # the second offset
        (46, b"\x02", "prefix sum"),  # the first
        (37, b"\x80", "negative"),
        (94, b"\x04", "boundaries"),
        (70, b"\x01", "boundaries"),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path, offset, value, message):
    write(tmp_path / "d")
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[offset : offset + 1] = value
    (tmp_path / "d.idx").write_bytes(raw)
    with pytest.raises(ValueError, match=rf"d\.idx.*{message}"):
        IndexedDataset(tmp_path / "d")


def test_offsets_that_are_all_shifted_are_refused(tmp_path):
    write(tmp_path / "d")
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    offsets = np.frombuffer(raw, "<i8", 3, offset=46)
    assert offsets.tolist() == [0, 4, 14]
    offsets += 2
    (tmp_path / "d.idx").write_bytes(raw)
    with pytest.raises(ValueError, match=r"d\.idx.*prefix sum"):
        IndexedDataset(tmp_path / "d")


BUILDER = """
import sys, time
import numpy as np
from megacomposer.data.indexed import IndexedWriter
with IndexedWriter(sys.argv[1], np.uint16) as writer:
    for k in range(100):
        writer.add_document(np.arange(100_000) % 1000)
    print("written", flush=True)
    time.sleep(600)
"""


def test_a_killed_builder_leaves_a_state_that_is_refused_by_name(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(tmp_path / "d")],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path) == ["d.bin.incomplete"]
    assert (tmp_path / "d.bin.incomplete").stat().st_size > 0
    with pytest.raises(ValueError, match=re.escape("d.bin.incomplete") + " has no d.idx"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d")  # and building again just works
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    assert len(IndexedDataset(tmp_path / "d")) == 3


def test_a_kill_between_the_renames_leaves_no_index_with_foreign_tokens(tmp_path):
    write(tmp_path / "d")
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(np.arange(8))  # as many bytes as before
        writer.seal()
        assert len(IndexedDataset(tmp_path / "d")) == 3
        # the first half of publish(), then the process is gone
        (tmp_path / "d.idx").unlink()
        os.replace(tmp_path / "d.bin.incomplete", tmp_path / "d.bin")
        with pytest.raises(ValueError, match=r"has no d\.idx"):
            IndexedDataset(tmp_path / "d")
        os.replace(tmp_path / "d.bin", tmp_path / "d.bin.incomplete")
    assert len(IndexedDataset(tmp_path / "d")) == 1


DISK_FULL = """
import resource, sys
import numpy as np
from megacomposer.data.indexed import IndexedWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with IndexedWriter(sys.argv[1], np.uint16) as writer:
        for k in range(int(sys.argv[3])):
            writer.add_document(np.ones(int(sys.argv[4]), dtype=np.int64))
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "documents", "length", "name"),
    [
        (1 << 20, 100, 100_000, "d.bin"),  # in the middle
        (1 << 20, 10, 100_000, "d.bin"),  # in the last flush
        (1 << 16, 10_000, 1, "d.idx"),  # in the index
    ],
)
def test_a_full_disk_is_one_error_that_names_the_file_and_leaves_nothing(
    tmp_path, limit, documents, length, name
):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = tmp_path / "d"
    arguments = [str(out), str(limit), str(documents), str(length)]
    result = subprocess.run(
        [sys.executable, "-c", DISK_FULL, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert f"cannot write {tmp_path / name}" in result.stdout
    assert "free space" in result.stdout
    assert os.listdir(tmp_path) == []
