"""Fill-in-the-middle transform."""

from __future__ import annotations

import numpy as np
import pytest

from megacomposer.data.config import FimConfig
from megacomposer.data.fim import encode_with_fim, require_fim
from megacomposer.data.tokenizer import ByteTokenizer, load_tokenizer

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
TEXT = "def f(x):\n    return x + 1  # na\u00efve \u4e2d \U0001f600\n".encode()


def restore(ids: list[int], tokenizer) -> tuple[str, tuple[str, str, str]]:
    """(order, (prefix, middle, suffix) as text) of a transformed document, by its special ids."""
    fim = tokenizer.fim_ids
    assert [ids.count(token) for token in fim] == [1, 1, 1]
    assert ids[0] == fim.prefix
    suffix, middle = ids.index(fim.suffix), ids.index(fim.middle)
    assert suffix < middle
    between, after = ids[suffix + 1 : middle], ids[middle + 1 :]
    if suffix == 1:  # SPM, or PSM with an empty prefix
        return "SPM", ("", tokenizer.decode(after), tokenizer.decode(between))
    return "PSM", tuple(tokenizer.decode(part) for part in (ids[1:suffix], after, between))


@pytest.mark.parametrize("raw", [TEXT, b"x", b"", b"\xff\xfe\x80 not utf8 \xc3"])
def test_round_trip_gives_the_bytes_back(raw):
    tokenizer = ByteTokenizer()
    config = FimConfig(rate=1.0, spm_frac=0.5)
    orders = set()
    for index in range(200):
        ids = encode_with_fim(raw, index, tokenizer, config, seed=3).tolist()
        order, (prefix, middle, suffix) = restore(ids, tokenizer)
        orders.add(order)
        whole = (prefix + middle + suffix).encode("utf-8", "surrogateescape")
        assert whole == raw
    assert "SPM" in orders
    if len(raw) > 1:
        assert orders == {"PSM", "SPM"}


def test_no_character_is_split():
    tokenizer = ByteTokenizer()
    for index in range(100):
        config = FimConfig(rate=1.0, spm_frac=0.0)
        ids = encode_with_fim(TEXT, index, tokenizer, config, seed=0).tolist()
        for part in restore(ids, tokenizer)[1]:
            part.encode("utf-8")  # a split character would leave a lone surrogate, and raise


def test_orders_are_those_of_the_paper():
    tokenizer = ByteTokenizer()
    fim = tokenizer.fim_ids
    for index in range(50):
        psm = encode_with_fim(b"abcdefgh", index, tokenizer, FimConfig(rate=1, spm_frac=0), seed=1)
        spm = encode_with_fim(b"abcdefgh", index, tokenizer, FimConfig(rate=1, spm_frac=1), seed=1)
        _, (prefix, middle, suffix) = restore(psm.tolist(), tokenizer)
        expected = [
            fim.prefix,
            fim.suffix,
            *suffix.encode(),
            fim.middle,
            *(prefix + middle).encode(),
        ]
        assert spm.tolist() == expected


def test_the_choice_depends_on_seed_and_index_only():
    tokenizer = ByteTokenizer()
    config = FimConfig(rate=0.5)

    def run(seed: int) -> list[list[int]]:
        return [
            encode_with_fim(TEXT, index, tokenizer, config, seed=seed).tolist()
            for index in range(100)
        ]

    assert run(0) == run(0)
    assert run(0) != run(1)
    # not the order of the calls
    backwards = [
        encode_with_fim(TEXT, index, tokenizer, config, seed=0).tolist()
        for index in reversed(range(100))
    ]
    assert backwards[::-1] == run(0)


def test_rates_are_kept():
    tokenizer = ByteTokenizer()
    plain = tokenizer.encode(TEXT).tolist()
    for rate in (0.0, 0.3, 1.0):
        config = FimConfig(rate=rate, spm_frac=0.25)
        ids = [encode_with_fim(TEXT, k, tokenizer, config, seed=5).tolist() for k in range(2000)]
        transformed = [document for document in ids if document != plain]
        assert abs(len(transformed) / 2000 - rate) < 0.04
        if rate == 1.0:
            spm = [document for document in ids if document[1] == tokenizer.fim_ids.suffix]
            # an empty prefix in PSM looks the same: 2 / 45 of the rest at most
            assert 0.21 < len(spm) / 2000 < 0.34


def test_split_points_cover_the_whole_text():
    tokenizer = ByteTokenizer()
    config = FimConfig(rate=1.0, spm_frac=0.0)
    starts, lengths = set(), set()
    for index in range(600):
        ids = encode_with_fim(b"abcd", index, tokenizer, config, seed=2).tolist()
        fim = tokenizer.fim_ids
        starts.add(ids.index(fim.suffix) - 1)
        lengths.add(len(ids) - 1 - ids.index(fim.middle))
    assert starts == lengths == {0, 1, 2, 3, 4}


def test_a_tokenizer_without_the_tokens_is_refused(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json())
    with pytest.raises(ValueError, match=r"fim\.rate is 0\.5.*tokenizer\.json has no"):
        encode_with_fim(TEXT, 0, tokenizer, FimConfig(rate=0.5), seed=0)
    require_fim(tokenizer, FimConfig(rate=0.0))


def test_hugging_face_tokenizer_round_trips(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json(("<|endoftext|>", *FIM_TOKENS)))
    for index in range(50):
        ids = encode_with_fim(TEXT, index, tokenizer, FimConfig(rate=1.0), seed=0)
        assert ids.dtype == np.int32
        _, parts = restore(ids.tolist(), tokenizer)
        assert "".join(parts).encode() == TEXT
