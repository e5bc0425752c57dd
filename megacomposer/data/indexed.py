"""Megatron's `.bin/.idx` token files: our own writer and memory-mapped reader.

`<prefix>.bin` holds the tokens of all sequences end to end. `<prefix>.idx`, little-endian:

    9 bytes  magic "MMIDIDX\\0\\0"        8  uint64 version, 1      1  uint8 dtype code
    8        uint64 number of sequences   8  uint64 number of document boundaries
    int32 [sequences]     tokens of each sequence
    int64 [sequences]     byte offset of each sequence in the .bin: exclusive prefix sum
    int64 [boundaries]    first sequence of each document, then the number of sequences

Written and read by megatron-core's `IndexedDataset` too. One document is one sequence here; files
with several sequences a document are read as well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
INCOMPLETE = ".incomplete"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_FLUSH_BYTES = 1 << 22


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """The dtype of a token file: uint16 below 65,500 ids (megatron-core's bound), else int32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def incomplete_path(path: Path) -> Path:
    return path.with_name(path.name + INCOMPLETE)


def write_error(error: OSError, path: Path) -> OSError:
    """`error` of a write again, as one line that names the file and the remedy."""
    remedy = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "; free space there or choose another place (the partial files are removed)"
    return OSError(error.errno, f"cannot write {path}: {os.strerror(error.errno or 0)}{remedy}")


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write `content` and make it durable; removes the file again when that fails (OSError)."""
    try:
        with open(path, "wb", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _index_bytes(sequences: int, boundaries: int) -> int:
    return _HEADER.size + sequences * 12 + boundaries * 8


def encode_index(lengths: np.ndarray, dtype: type[np.number[Any]]) -> bytes:
    """The bytes of an `.idx` for documents of `lengths` tokens (int64), one sequence each."""
    sizes = np.asarray(lengths, dtype=np.int64)
    pointers = np.zeros_like(sizes)
    np.cumsum(sizes[:-1], out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    boundaries = np.arange(len(sizes) + 1, dtype=np.int64)
    code = _CODES[np.dtype(dtype)]
    return b"".join(
        (
            _HEADER.pack(MAGIC, VERSION, code, len(sizes), len(boundaries)),
            sizes.astype("<i4").tobytes(),
            pointers.astype("<i8").tobytes(),
            boundaries.astype("<i8").tobytes(),
        )
    )


class IndexedWriter:
    """Writes one `.bin/.idx` pair: `with IndexedWriter(prefix, dtype) as w: w.add_document(ids)`.

    Everything goes to `<name>.incomplete` first. Only a clean end of the `with` block writes the
    index (`seal`) and then renames both files (`publish`): the old `.idx` leaves before the new
    `.bin` arrives, and the new `.idx` comes last, so an `.idx` always has its own `.bin` and a
    killed writer leaves no `.idx`. An exception removes the partial files. To publish several
    files together, call `seal` and `publish` inside the block.

    Raises ValueError for ids that `dtype` cannot hold, an empty document, or no document at all;
    OSError naming the file when it cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: type[np.number[Any]]) -> None:
        if np.dtype(dtype) not in _CODES:
            raise ValueError(f"dtype {dtype} is not one of the format; see token_dtype()")
        self.bin = bin_path(prefix)
        self.idx = idx_path(prefix)
        self.dtype = np.dtype(dtype)
        self.tokens = 0
        """Tokens added so far."""
        self._bounds = np.iinfo(self.dtype)
        self._lengths: list[int] = []
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._bin_digest = hashlib.sha256()
        self._idx_digest = hashlib.sha256()
        self._file: IO[bytes] | None = None
        self._state = "open"

    def __enter__(self) -> Self:
        path = incomplete_path(self.bin)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: after a failed write there is nothing left that close() would write again
            self._file = open(path, "wb", buffering=0)
        except OSError as error:
            raise write_error(error, path) from error
        return self

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document of token ids, any integer dtype, [length > 0]."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"a document is a non-empty row of ids, got shape {ids.shape}")
        if ids.size > np.iinfo(np.int32).max:
            raise ValueError(f"a document of {ids.size} tokens; the format's limit is 2^31 - 1")
        low, high = int(ids.min()), int(ids.max())
        if low < self._bounds.min or high > self._bounds.max:
            raise ValueError(
                f"ids {low}..{high} do not fit {self.dtype} in {self.bin}; "
                "choose the dtype with token_dtype(vocab_size)"
            )
        self._pending.append(ids.astype(self.dtype.newbyteorder("<")).tobytes())
        self._pending_bytes += len(self._pending[-1])
        self._lengths.append(ids.size)
        self.tokens += ids.size
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def seal(self) -> None:
        """Write and sync everything under the incomplete names; nothing can be added after."""
        assert self._file is not None
        assert self._state == "open"
        if not self._lengths:
            raise ValueError(f"no documents for {self.bin}; nothing was written")
        self._flush()
        index = encode_index(np.array(self._lengths), self.dtype.type)
        self._idx_digest.update(index)
        path = self.bin
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            path = self.idx
            write_synced(incomplete_path(self.idx), index)
        except OSError as error:
            raise write_error(error, path) from error
        self._state = "sealed"

    def publish(self) -> None:
        """Rename the sealed files into place; replaces an older pair of the same prefix."""
        assert self._state == "sealed"
        try:
            self.idx.unlink(missing_ok=True)
            sync_directory(self.idx.parent)
            os.replace(incomplete_path(self.bin), self.bin)
            sync_directory(self.bin.parent)
            os.replace(incomplete_path(self.idx), self.idx)
            sync_directory(self.idx.parent)
        except OSError as error:
            raise write_error(error, self.idx) from error
        self._state = "published"

    def checksums(self) -> dict[str, dict[str, int | str]]:
        """Size and SHA-256 of the two sealed files, by file name."""
        assert self._state != "open"
        return {
            self.bin.name: {
                "bytes": self.tokens * self.dtype.itemsize,
                "sha256": self._bin_digest.hexdigest(),
            },
            self.idx.name: {
                "bytes": _index_bytes(self.documents, self.documents + 1),
                "sha256": self._idx_digest.hexdigest(),
            },
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            if kind is None and self._state == "open":
                self.seal()
            if kind is None and self._state == "sealed":
                self.publish()
        finally:
            self._file.close()
            incomplete_path(self.bin).unlink(missing_ok=True)
            incomplete_path(self.idx).unlink(missing_ok=True)

    def _flush(self) -> None:
        assert self._file is not None
        assert self._state == "open"
        block = b"".join(self._pending)
        self._bin_digest.update(block)
        self._pending, self._pending_bytes = [], 0
        view = memoryview(block)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise write_error(error, self.bin) from error


class IndexedDataset:
    """Memory-mapped view of one `.bin/.idx` pair.

    Raises ValueError, naming the file and the remedy, when a file is missing, cut short, of another
    format, or does not belong to the other one.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        data, index = bin_path(self.prefix), idx_path(self.prefix)
        _check_present(data, index)
        raw = np.memmap(index, dtype=np.uint8, mode="r") if index.stat().st_size else None
        sequences, boundaries, code = _parse_header(index, raw)
        assert raw is not None
        self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        lengths, pointers, documents = _split_index(raw, sequences, boundaries)
        _check_index(index, lengths, pointers, documents, self.dtype.itemsize)
        totals = np.zeros(sequences + 1, dtype=np.int64)
        np.cumsum(lengths, dtype=np.int64, out=totals[1:])
        _check_bin_size(data, int(totals[-1]) * self.dtype.itemsize)
        self._starts = totals[documents]
        self.document_lengths = np.diff(self._starts)
        """int64 [documents]: tokens of each document."""
        self.total_tokens = int(totals[-1])
        self._tokens = (
            np.memmap(data, dtype=self.dtype, mode="r")
            if self.total_tokens
            else np.empty(0, dtype=self.dtype)
        )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_lengths)

    def tokens(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Ids `[start, start + length)` of a document: a read-only view, dtype of the file.

        `length` None reads to the end. Raises ValueError when the piece is not inside the document.
        """
        if not 0 <= document < len(self):
            raise ValueError(f"document {document} of {self.prefix}, which has {len(self)}")
        size = int(self.document_lengths[document])
        stop = size if length is None else start + length
        if not 0 <= start <= stop <= size:
            raise ValueError(
                f"tokens {start}..{stop} of document {document} of {self.prefix}, which has {size}"
            )
        origin = int(self._starts[document])
        return self._tokens[origin + start : origin + stop]

    def all_tokens(self) -> np.ndarray:
        """The whole `.bin`, documents end to end: a read-only view."""
        return self._tokens


def _check_bin_size(data: Path, expected: int) -> None:
    """The offsets are checked prefix sums, so `expected` is the last one plus its sequence."""
    size = data.stat().st_size
    if size != expected:
        word = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{data} is {word}: {size} bytes, its index says {expected}; copy the pair again, "
            "or delete both files and prepare the dataset again"
        )


def _check_present(data: Path, index: Path) -> None:
    if index.exists() and data.exists():
        return
    if data.exists() or incomplete_path(data).exists():
        found = data if data.exists() else incomplete_path(data)
        raise ValueError(
            f"{found} has no {index.name}: a build that did not finish (or still runs); "
            f"delete {found} and prepare the dataset again"
        )
    missing = data if index.exists() else index
    raise ValueError(
        f"{missing} does not exist; check the prefix, or make the dataset with prepare_data.py"
    )


def _parse_header(index: Path, raw: np.ndarray | None) -> tuple[int, int, int]:
    remedy = "copy it again, or delete the pair and prepare the dataset again"
    size = 0 if raw is None else raw.size
    if raw is None or size < _HEADER.size:
        raise ValueError(f"{index} is truncated: {size} bytes are no header; {remedy}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{index} is not a Megatron index: it starts with {magic!r}; {remedy}")
    if version != VERSION:
        raise ValueError(f"{index} has version {version}, this reader knows {VERSION}")
    if code not in _DTYPES:
        raise ValueError(f"{index} has dtype code {code}, known token dtypes: {sorted(_DTYPES)}")
    expected = _index_bytes(sequences, boundaries)
    # a multimodal index has one mode byte per sequence at its end; text has none
    if size != expected:
        word = "truncated" if size < expected else "too long (a multimodal index is not supported)"
        raise ValueError(f"{index} is {word}: {size} bytes, expected {expected}; {remedy}")
    return sequences, boundaries, code


def _split_index(
    raw: np.ndarray, sequences: int, boundaries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = _HEADER.size
    lengths = np.frombuffer(raw, "<i4", sequences, at)
    pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", boundaries, at + 12 * sequences)
    return lengths, pointers, documents


def _check_index(
    index: Path, lengths: np.ndarray, pointers: np.ndarray, boundaries: np.ndarray, itemsize: int
) -> None:
    remedy = "the file is damaged: delete the pair and prepare the dataset again"
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"{index} has a negative sequence length; {remedy}")
    steps = lengths.astype(np.int64) * itemsize
    if len(pointers) and (pointers[0] != 0 or not np.array_equal(np.diff(pointers), steps[:-1])):
        raise ValueError(f"{index}: offsets are not the prefix sum of the lengths; {remedy}")
    ends = (boundaries[0], boundaries[-1]) if len(boundaries) else None
    if ends != (0, len(lengths)) or (np.diff(boundaries) < 0).any():
        raise ValueError(f"{index}: document boundaries do not run from 0 to the end; {remedy}")
