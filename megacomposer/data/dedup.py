"""Removal of repeated files: exact by SHA-256, near by MinHash, LSH banding and true Jaccard.

Broder 1997 for MinHash; the banding is that of Leskovec, Rajaraman and Ullman, "Mining of massive
datasets", chapter 3. The hot loop is csrc/minhash.cpp when its shared library is built, and the
numpy reference here otherwise: the same signatures bit for bit, only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from megacomposer.data.config import DedupConfig
from megacomposer.data.sources import Document, Funnel

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_minhash.so")
LIBRARY_VERSION = 1
NO_SHINGLE = 0xFFFFFFFF
"""Every row of the signature of a document without words."""

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_SHINGLES = 4096
_WORD_BYTE = np.zeros(256, dtype=bool)
_WORD_BYTE[list(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")] = True
_WORD_BYTE[0x80:] = True


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on uint64 values of any shape."""
    x: np.ndarray = values
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


def permutation_constants(permutations: int) -> tuple[np.ndarray, np.ndarray]:
    """(a, b), uint64 [permutations] each, a odd: fixed, so that signatures can be compared."""
    steps = np.arange(1, 2 * permutations + 1, dtype=np.uint64)
    stream = splitmix64(steps * _MULTIPLIER)
    return stream[:permutations] | np.uint64(1), stream[permutations:].copy()


def shingles_reference(text: bytes, shingle_words: int) -> np.ndarray:
    """uint64 [shingles]: hashes of the word shingles of `text`, in order, with repeats."""
    raw = np.frombuffer(text, dtype=np.uint8)
    inside = np.concatenate(([False], _WORD_BYTE[raw], [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    words = np.full(len(starts), _FNV_OFFSET)
    for offset in range(int((ends - starts).max(initial=0))):
        longer = np.flatnonzero(starts + offset < ends)
        words[longer] = (words[longer] ^ raw[starts[longer] + offset]) * _FNV_PRIME
    span = min(len(words), shingle_words)
    if not span:
        return np.empty(0, dtype=np.uint64)
    count = len(words) - span + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for j in range(span):
        hashes = hashes * _MULTIPLIER + words[j : j + count]
    return splitmix64(hashes)


def signature_reference(shingles: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """uint32 [permutations]: the MinHash signature of uint64 [shingles]."""
    smallest = np.full(len(a), np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(shingles), _BLOCK_SHINGLES):
        block = shingles[start : start + _BLOCK_SHINGLES]
        np.minimum(smallest, (a[:, None] * block + b[:, None]).min(axis=1), out=smallest)
    return (smallest >> np.uint64(32)).astype(np.uint32)


class MinHasher:
    """Signatures by the shared library `library` if that file exists, else by numpy.

    `backend` says which: "cpp" or "numpy". Raises ValueError for a library that cannot be loaded or
    is of another version: it is never passed over.
    """

    def __init__(
        self, *, permutations: int, shingle_words: int, library: Path | None = LIBRARY
    ) -> None:
        self.permutations = permutations
        self.shingle_words = shingle_words
        self._a, self._b = permutation_constants(permutations)
        present = library is not None and library.exists()
        self._library = _load_library(library) if present and library is not None else None
        self.backend = "numpy" if self._library is None else "cpp"

    def signature(self, text: bytes) -> np.ndarray:
        """uint32 [permutations]; `NO_SHINGLE` everywhere for a text without words."""
        if self._library is None:
            return signature_reference(self.shingles(text), self._a, self._b)
        result = np.empty(self.permutations, dtype=np.uint32)
        self._library.megacomposer_minhash_signature(
            text,
            len(text),
            self.shingle_words,
            self._a.ctypes.data,
            self._b.ctypes.data,
            self.permutations,
            result.ctypes.data,
        )
        return result

    def shingles(self, text: bytes) -> np.ndarray:
        """uint64 [shingles], in order and with repeats."""
        if self._library is None:
            return shingles_reference(text, self.shingle_words)
        result = np.empty(len(text) // 2 + 1, dtype=np.uint64)  # a word needs a byte and a gap
        count = self._library.megacomposer_minhash_shingles(
            text, len(text), self.shingle_words, result.ctypes.data, len(result)
        )
        assert count <= len(result)
        return result[:count]


def _load_library(path: Path) -> ctypes.CDLL:
    remedy = f"delete {path.name} or build it again from csrc/minhash.cpp"
    try:
        library = ctypes.CDLL(str(path))
        version = library.megacomposer_minhash_version
    except (OSError, AttributeError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}; {remedy}") from error
    version.restype = ctypes.c_int64
    if version() != LIBRARY_VERSION:
        raise ValueError(f"{path} has version {version()}, expected {LIBRARY_VERSION}; {remedy}")
    text, count, pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    signature = library.megacomposer_minhash_signature
    signature.argtypes = (text, count, count, pointer, pointer, count, pointer)
    signature.restype = count
    shingles = library.megacomposer_minhash_shingles
    shingles.argtypes = (text, count, count, pointer, count)
    shingles.restype = count
    return library


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Similarity of two sets given as sorted arrays without repeats; 0 for two empty ones."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - common
    return common / union if union else 0.0


def deduplicate(
    documents: Sequence[Document],
    config: DedupConfig,
    funnel: Funnel,
    *,
    library: Path | None = LIBRARY,
) -> list[Document]:
    """`documents` without repeats, in the same order; of a group of equals the first one stays.

    A document goes when its bytes were seen before, or when its Jaccard similarity to a document
    that stayed is at least `config.threshold`: LSH only proposes pairs, the true similarity of the
    shingle sets decides. Counted in `funnel` as `duplicate` and `near_duplicate`; the note
    `minhash` says which implementation ran.
    """
    kept = _drop_exact(documents, funnel) if config.exact else list(documents)
    return _drop_near(kept, config, funnel, library) if config.near else kept


def _drop_exact(documents: Sequence[Document], funnel: Funnel) -> list[Document]:
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        digest = hashlib.sha256(document.text).digest()
        if digest in seen:
            funnel.count("duplicate", len(document.text))
            continue
        seen.add(digest)
        kept.append(document)
    return kept


def _drop_near(
    documents: Sequence[Document], config: DedupConfig, funnel: Funnel, library: Path | None
) -> list[Document]:
    hasher = MinHasher(
        permutations=config.permutations, shingle_words=config.shingle_words, library=library
    )
    funnel.notes["minhash"] = hasher.backend
    logger.info("minhash runs in %s", hasher.backend)
    rows = config.permutations // config.bands
    buckets: list[dict[bytes, list[int]]] = [{} for _ in range(config.bands)]
    kept: list[Document] = []

    # shingle sets are larger than the texts, so only those just compared are kept
    @lru_cache(maxsize=256)
    def shingle_set(index: int) -> np.ndarray:
        return np.unique(hasher.shingles(kept[index].text))

    for document in documents:
        signature = hasher.signature(document.text)
        if (signature == NO_SHINGLE).all():
            kept.append(document)
            continue
        keys = [signature[k * rows : (k + 1) * rows].tobytes() for k in range(config.bands)]
        pairs = zip(buckets, keys, strict=True)
        candidates = sorted({i for bucket, key in pairs for i in bucket.get(key, ())})
        if candidates:
            own = np.unique(hasher.shingles(document.text))
            if any(jaccard(own, shingle_set(i)) >= config.threshold for i in candidates):
                funnel.count("near_duplicate", len(document.text))
                continue
        for bucket, key in zip(buckets, keys, strict=True):
            bucket.setdefault(key, []).append(len(kept))
        kept.append(document)
    return kept
