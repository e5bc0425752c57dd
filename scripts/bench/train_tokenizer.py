"""Train a byte-level BPE tokenizer on the standard library's sources, for benchmarks.

python scripts/bench/train_tokenizer.py --out data/bpe_tokenizer.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megacomposer.data.sources import stdlib_root

EOD = "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=16384)
    args = parser.parse_args()
    skipped = {"site-packages", "test", "tests"}
    files = [
        str(path)
        for path in sorted(Path(stdlib_root()).rglob("*.py"))
        if not skipped & set(path.parts)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out))
    print(json.dumps({"files": len(files), "vocab_size": tokenizer.get_vocab_size()}))


if __name__ == "__main__":
    main()
