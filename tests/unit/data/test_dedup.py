"""Exact and near duplicates, and the two implementations of MinHash against each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megacomposer.data.config import DedupConfig
from megacomposer.data.dedup import (
    LIBRARY,
    MinHasher,
    deduplicate,
    jaccard,
    permutation_constants,
    shingles_reference,
    signature_reference,
)
from megacomposer.data.sources import Document, Funnel

SOURCE = Path(__file__).parents[3] / "csrc/minhash.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build csrc/minhash.cpp with")
    out = tmp_path_factory.mktemp("minhash") / "_minhash.so"
    command = ["g++", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(out), str(SOURCE)], check=True)
    return out


def words(seed: int, count: int) -> list[str]:
    return [f"w{n}" for n in np.random.default_rng(seed).integers(0, 5000, count)]


def document(name: str, text: str) -> Document:
    return Document(source="t", path=name, text=text.encode())


TEXTS = [
    b"",
    b" \n;;",
    b"one",
    b"one two three four",
    b"a b c d e",
    b"a b c d e f g",
    b"tail_word",
    bytes(range(256)) * 3,
    "na\u00efve \u4e2d\u6587 words \U0001f600".encode(),
    b"x" * 5000 + b" y",
    " ".join(words(1, 9000)).encode(),
    np.random.default_rng(2).integers(0, 256, 20_000, dtype=np.uint8).tobytes(),
]


@pytest.mark.parametrize("shingle_words", [1, 5])
@pytest.mark.parametrize("permutations", [1, 128])
def test_cpp_and_numpy_signatures_agree_bit_for_bit(library, shingle_words, permutations):
    arguments = {"permutations": permutations, "shingle_words": shingle_words}
    fast = MinHasher(**arguments, library=library)
    slow = MinHasher(**arguments, library=None)
    assert (fast.backend, slow.backend) == ("cpp", "numpy")
    for text in TEXTS:
        assert np.array_equal(fast.shingles(text), slow.shingles(text))
        assert np.array_equal(fast.signature(text), slow.signature(text))


def test_signature_is_the_minimum_over_shingles_of_plain_python_integers():
    a, b = permutation_constants(4)
    text = b"one two, three (four) five six_7 one two"
    shingles = [int(s) for s in shingles_reference(text, 3)]
    assert len(shingles) == 8 - 2
    naive = [
        min((int(x) * s + int(y)) % 2**64 for s in shingles) >> 32
        for x, y in zip(a, b, strict=True)
    ]
    assert signature_reference(np.array(shingles, dtype=np.uint64), a, b).tolist() == naive


def test_agreeing_rows_estimate_the_jaccard_similarity():
    hasher = MinHasher(permutations=2048, shingle_words=1, library=None)
    base = words(3, 4000)
    first = " ".join(base).encode()
    second = " ".join(base[:3000] + words(4, 1000)).encode()
    true = jaccard(*(np.unique(hasher.shingles(text)) for text in (first, second)))
    agreed = float((hasher.signature(first) == hasher.signature(second)).mean())
    assert 0.3 < true < 0.9
    assert abs(agreed - true) < 5 * (true * (1 - true) / 2048) ** 0.5


def test_jaccard_of_small_sets():
    sets = [np.array(values, dtype=np.uint64) for values in ([], [1], [1, 2, 3], [2, 3, 4])]
    assert jaccard(sets[2], sets[3]) == 0.5
    assert jaccard(sets[2], sets[2]) == 1
    assert jaccard(sets[0], sets[1]) == jaccard(sets[0], sets[0]) == 0


def test_near_copies_go_the_first_stays_and_different_files_stay():
    base = words(5, 400)
    edited = [*base[:200], "inserted", *base[201:]]
    half = base[:200] + words(6, 200)
    documents = [
        document("a", " ".join(base)),
        document("b", " ".join(words(7, 400))),
        document("c", " ".join(edited)),
        document("d", " ".join(base)),
        document("e", " ".join(half)),
        document("f", "\n".join(base)),  # other bytes, same words
    ]
    funnel = Funnel()
    kept = deduplicate(documents, DedupConfig(), funnel, library=None)
    assert [d.path for d in kept] == ["a", "b", "e"]
    assert funnel.files("duplicate") == 1
    assert funnel.files("near_duplicate") == 2
    assert funnel.notes == {"minhash": "numpy"}
    again = deduplicate(documents, DedupConfig(), Funnel(), library=None)
    assert again == kept


def test_the_similarity_decides_not_the_lsh_candidates():
    base = words(8, 400)
    documents = [
        document("a", " ".join(base)),
        document("b", " ".join(base[:280] + words(9, 120))),
    ]
    shingles = [np.unique(shingles_reference(d.text, 5)) for d in documents]
    similarity = jaccard(*shingles)
    assert 0.4 < similarity < 0.7
    # one row a band: the pair is a candidate in any case
    for threshold, left in ((similarity + 0.01, 2), (similarity, 1)):
        config = DedupConfig(threshold=threshold, bands=128)
        assert len(deduplicate(documents, config, Funnel(), library=None)) == left


def test_files_without_words_are_only_compared_exactly():
    documents = [document("a", "{};"), document("b", "[];"), document("c", "{};")]
    kept = deduplicate(documents, DedupConfig(), Funnel(), library=None)
    assert [d.path for d in kept] == ["a", "b"]
    off = DedupConfig(exact=False, near=False)
    assert deduplicate(documents, off, Funnel(), library=None) == documents


def test_both_implementations_keep_the_same_documents(library):
    texts = [words(seed, 60) for seed in range(40)]
    texts += [[*text[:-1], "x"] for text in texts[::3]]
    documents = [document(str(k), " ".join(text)) for k, text in enumerate(texts)]
    funnels = (Funnel(), Funnel())
    fast = deduplicate(documents, DedupConfig(), funnels[0], library=library)
    slow = deduplicate(documents, DedupConfig(), funnels[1], library=None)
    assert fast == slow
    assert len(fast) < len(documents)
    assert [f.notes["minhash"] for f in funnels] == ["cpp", "numpy"]


def test_a_library_that_cannot_be_used_is_an_error_not_a_silent_fallback(tmp_path):
    broken = tmp_path / "_minhash.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(ValueError, match=r"_minhash\.so cannot be loaded.*csrc/minhash\.cpp"):
        MinHasher(permutations=1, shingle_words=1, library=broken)


def test_a_library_of_another_version_is_refused(tmp_path, library):
    other = tmp_path / "minhash.cpp"
    text = SOURCE.read_text()
    assert "megacomposer_minhash_version() { return 1; }" in text
    other.write_text(text.replace("_version() { return 1; }", "_version() { return 99; }"))
    out = tmp_path / "_minhash.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(out), str(other)], check=True)
    with pytest.raises(ValueError, match="version 99, expected 1"):
        MinHasher(permutations=1, shingle_words=1, library=out)


def test_the_library_is_looked_for_next_to_the_package():
    assert LIBRARY.parent.name == "data"
    assert LIBRARY.name == "_minhash.so"
