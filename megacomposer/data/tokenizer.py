"""Tokenizers: bytes as they are, or a Hugging Face `tokenizer.json`.

Text that is data is never control: a document that spells out `<|endoftext|>` does not become the
end-of-document id. What no tokenizer setting can prevent, `control_ids` lets a caller find.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
    "<eos>",
    "</s>",
)
"""Names of the end-of-document token, the first that the vocabulary has is taken."""

PAD_NAMES = ("<|pad|>", "[PAD]", "<pad>", "<|fim_pad|>", "<|finetune_right_pad_id|>")

FIM_NAMES = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    # DeepSeek writes begin, prefix, hole, suffix, end: "hole" opens the suffix, "end" the middle
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"),
)
"""Names of the (prefix, middle, suffix) tokens; the first triple that is there whole is taken."""


class FimIds(NamedTuple):
    """Ids of the fill-in-the-middle tokens."""

    prefix: int
    middle: int
    suffix: int


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    spec: str
    """What `load_tokenizer` was given."""
    vocab_size: int
    """All ids are below it; ids without a meaning may be too."""
    eod_id: int
    """End of document."""
    pad_id: int | None
    fim_ids: FimIds | None
    """None when the tokenizer has no fill-in-the-middle tokens."""
    accepts_any_bytes: bool
    """Whether bytes that are not UTF-8 can be encoded."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, int32 [tokens], of plain text; adds no special token.

        Raises ValueError for bytes that are not UTF-8 unless `accepts_any_bytes`.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; special tokens are left out."""
        ...

    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids."""
        ...


def control_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that mean structure: end of document and fill-in-the-middle."""
    return (tokenizer.eod_id, *(tokenizer.fim_ids or ()))


class ByteTokenizer:
    """One id per byte, 0..255, then five special ids; 264 ids, the last three without a meaning.

    Lossless on arbitrary bytes. `str` is UTF-8 with the `surrogateescape` rule of PEP 383 both
    ways: a byte that is not UTF-8 decodes to a lone surrogate U+DC80..U+DCFF and encodes to itself
    again. Other lone surrogates raise UnicodeEncodeError (a ValueError).
    """

    spec = "byte"
    vocab_size = 264
    eod_id = 256
    pad_id: int | None = 257
    fim_ids: FimIds | None = FimIds(prefix=258, middle=259, suffix=260)
    accepts_any_bytes = True

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `ids`; special ids are left out. ValueError for ids that do not exist."""
        values = np.asarray(ids, dtype=np.int64).reshape(-1)
        if values.size and not 0 <= values.min() <= values.max() < self.vocab_size:
            raise ValueError(
                f"ids {values.min()}..{values.max()} are not all in [0, {self.vocab_size})"
            )
        return values[values < 256].astype(np.uint8).tobytes()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.decode_bytes(ids).decode("utf-8", "surrogateescape")

    def fingerprint(self) -> str:
        return "byte-264-v1"


class HfTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    Raises ValueError when the file cannot be read, or when it has no known end-of-document token
    and `eod_token` names none.
    """

    accepts_any_bytes = False

    def __init__(self, path: str, *, eod_token: str | None = None) -> None:
        import tokenizers

        try:
            content = Path(path).read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except OSError as error:
            raise ValueError(f"tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ValueError(f"tokenizer {path} is not a tokenizer.json: {error}") from error
        # documents must not be able to forge a special token by spelling it out
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._digest = hashlib.sha256(content).hexdigest()
        self.spec = path
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = EOD_NAMES if eod_token is None else (eod_token,)
        eod = next((vocabulary[name] for name in names if name in vocabulary), None)
        if eod is None:
            raise ValueError(
                f"tokenizer {path} has none of {', '.join(names)}; name its end-of-document token "
                "with eod_token"
            )
        self.eod_id: int = eod
        self.pad_id = next((vocabulary[name] for name in PAD_NAMES if name in vocabulary), None)
        self.fim_ids: FimIds | None = None
        for triple in FIM_NAMES:
            if all(name in vocabulary for name in triple):
                self.fim_ids = FimIds(*(vocabulary[name] for name in triple))
                break

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))

    def fingerprint(self) -> str:
        return f"sha256:{self._digest}:eod={self.eod_id}"


def load_tokenizer(spec: str, *, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names: `byte`, or the path of a `tokenizer.json`.

    `eod_token` overrides the end-of-document token of a `tokenizer.json`. Raises ValueError for a
    file that is not there or not a tokenizer.
    """
    if spec == "byte":
        if eod_token is not None:
            raise ValueError("eod_token is for a tokenizer.json; the byte tokenizer has its own")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return HfTokenizer(str(path / "tokenizer.json"), eod_token=eod_token)
    if not path.is_file():
        raise ValueError(
            f"tokenizer {spec!r} is neither 'byte' nor a tokenizer.json file that exists"
        )
    return HfTokenizer(spec, eod_token=eod_token)
