"""Fill-in-the-middle: documents reordered so that a model learns to infill.

Bavarian et al. 2022, "Efficient training of language models to fill in the middle": document level,
two split points uniform over characters, orders PSM and SPM (the paper's variant of SPM, which
shares its first tokens with PSM).
"""

from __future__ import annotations

import hashlib

import numpy as np

from megacomposer.data.config import FimConfig
from megacomposer.data.tokenizer import Tokenizer

_UNIT = float(1 << 53)


def _uniforms(seed: int, index: int) -> tuple[float, float, float, float]:
    """Four numbers in [0, 1), a fixed function of the arguments on every platform and version."""
    digest = hashlib.blake2b(f"fim/{seed}/{index}".encode(), digest_size=32).digest()
    words = (int.from_bytes(digest[at : at + 8], "little") >> 11 for at in (0, 8, 16, 24))
    first, second, third, fourth = (word / _UNIT for word in words)
    return first, second, third, fourth


def require_fim(tokenizer: Tokenizer, config: FimConfig) -> None:
    """ValueError when the transform is on and the tokenizer has no tokens for it."""
    if config.rate > 0 and tokenizer.fim_ids is None:
        raise ValueError(
            f"fim.rate is {config.rate}, but tokenizer {tokenizer.spec} has no fill-in-the-middle "
            "tokens; set fim.rate to 0 or take another tokenizer"
        )


def encode_with_fim(
    text: bytes, index: int, tokenizer: Tokenizer, config: FimConfig, *, seed: int
) -> np.ndarray:
    """Ids of document number `index`, int32 [tokens], transformed or not; no end-of-document id.

    PSM: `<prefix> P <suffix> S <middle> M`. SPM: `<prefix> <suffix> S <middle> P M`. The pieces are
    tokenized one by one, and split between characters, never inside one. Whether, where and in
    which order depends on `(seed, index)` and the number of characters only.
    """
    require_fim(tokenizer, config)
    chosen, order, low, high = _uniforms(seed, index)
    ids = tokenizer.fim_ids
    if chosen >= config.rate or ids is None:
        return tokenizer.encode(text)
    errors = "surrogateescape" if tokenizer.accepts_any_bytes else "strict"
    characters = text.decode("utf-8", errors)
    # every one of the n + 1 places between characters, the two ends included
    start, end = sorted(int(u * (len(characters) + 1)) for u in (low, high))
    prefix, middle, suffix = (
        tokenizer.encode(piece)
        for piece in (characters[:start], characters[start:end], characters[end:])
    )
    parts: tuple[np.ndarray | list[int], ...]
    if order < config.spm_frac:
        parts = ([ids.prefix, ids.suffix], suffix, [ids.middle], prefix, middle)
    else:
        parts = ([ids.prefix], prefix, [ids.suffix], suffix, [ids.middle], middle)
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
