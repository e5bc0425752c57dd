"""Byte and Hugging Face tokenizers."""

from __future__ import annotations

import numpy as np
import pytest

from megacomposer.data.tokenizer import ByteTokenizer, FimIds, control_ids, load_tokenizer

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


def test_bytes_are_lossless_also_when_they_are_not_utf8():
    tokenizer = load_tokenizer("byte")
    raw = bytes(range(256)) + "na\u00efve \u4e2d \U0001f600".encode() + b"\xff\xfe\xc3"
    ids = tokenizer.encode(raw)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(raw)
    text = tokenizer.decode(ids)
    assert text.encode("utf-8", "surrogateescape") == raw
    assert tokenizer.encode(text).tolist() == list(raw)
    assert ByteTokenizer().decode_bytes(ids) == raw


def test_special_ids_are_apart_from_bytes_and_left_out_of_the_text():
    tokenizer = load_tokenizer("byte")
    special = [*control_ids(tokenizer), tokenizer.pad_id]
    assert len(set(special)) == 5
    assert all(256 <= token < tokenizer.vocab_size for token in special)
    assert tokenizer.decode([104, tokenizer.eod_id, 105]) == "hi"
    with pytest.raises(ValueError, match="264"):
        tokenizer.decode([264])
    with pytest.raises(ValueError, match="-1"):
        tokenizer.decode([-1])


def test_a_lone_surrogate_that_stands_for_no_byte_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        load_tokenizer("byte").encode("\ud800")


def test_hugging_face_file_round_trips_text(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json())
    text = "def f(self):\n    return '\u4e2d' # \U0001f600\r\n"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert ids.max() < tokenizer.vocab_size
    assert len(tokenizer.encode("def return")) < len("def return")
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod_id]) == text
    assert tokenizer.fim_ids is None
    assert not tokenizer.accepts_any_bytes
    with pytest.raises(UnicodeDecodeError):
        tokenizer.encode(b"\xff")


def test_text_cannot_forge_a_special_token(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json())
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eod_id not in ids.tolist()
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_fill_in_the_middle_ids_are_found_by_name(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json(("<|endoftext|>", *FIM_TOKENS)))
    assert tokenizer.fim_ids == FimIds(prefix=1, middle=2, suffix=3)
    assert tokenizer.eod_id == 0


def test_a_file_with_two_of_three_fill_in_the_middle_tokens_has_none(tokenizer_json):
    assert load_tokenizer(tokenizer_json(("</s>", *FIM_TOKENS[:2]))).fim_ids is None


def test_end_of_document_must_be_known_or_named(tokenizer_json):
    path = tokenizer_json(("<|stop|>",))
    with pytest.raises(ValueError, match="eod_token"):
        load_tokenizer(path)
    assert load_tokenizer(path, eod_token="<|stop|>").eod_id == 0
    with pytest.raises(ValueError, match="nothing"):
        load_tokenizer(path, eod_token="nothing")


def test_a_tokenizer_that_is_not_there_or_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="neither 'byte' nor"):
        load_tokenizer("bytes")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_fingerprint_changes_with_the_file(tokenizer_json):
    first = load_tokenizer(tokenizer_json()).fingerprint()
    assert first == load_tokenizer(tokenizer_json()).fingerprint()
    assert first != load_tokenizer(tokenizer_json(added=("<tool>",))).fingerprint()
