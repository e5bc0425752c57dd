"""Settings of the data room: what is prepared, and what a training run reads.

No torch here, so that a command line answers at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from megacomposer.config import Config

CODE_EXTENSIONS = (
    ".bash .c .cc .clj .cpp .cs .css .cu .cuh .dart .el .erl .ex .exs .f90 .fs .go .h .hpp .hs "
    ".html .java .jl .js .jsx .kt .lua .m .md .ml .mm .nim .php .pl .proto .ps1 .py .pyi .pyx .r "
    ".rb .rs .rst .scala .sh .sql .swift .tcl .toml .ts .tsx .v .vue .yaml .yml .zig"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Config):
    """One prepared dataset of a blend."""

    prefix: str
    """Path of the `.bin/.idx` pair without its ending, such as `data/stdlib/train`."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources; the sum need not be 1."""

    def __post_init__(self) -> None:
        if not self.prefix:
            raise ValueError("prefix is empty; give the path of the .bin/.idx pair without ending")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"weight of {self.prefix} is {self.weight}; give a number > 0 or remove the source"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What a training run reads."""

    sources: tuple[DataSource, ...]
    """The blend; at least one."""
    seq_length: int
    """Tokens of one packed sequence."""
    heldout_prefix: str | None = None
    """`.bin/.idx` pair for the held-out loss; None for no evaluation."""
    tokenizer: str = "byte"
    """`byte`, or the path of a Hugging Face `tokenizer.json`; as for the data."""
    seed: int = 0
    """Seed of the order of documents; the blend itself is not random."""
    prefetch: bool = True
    """Build the next step's batches in a background thread; changes nothing in their content."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty; give at least one DataSource(prefix=...)")
        prefixes = [source.prefix for source in self.sources]
        repeated = sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1})
        if repeated:
            raise ValueError(f"sources names {repeated[0]} twice; add the weights in one entry")
        if self.heldout_prefix in prefixes:
            raise ValueError(f"heldout_prefix {self.heldout_prefix} is also a training source")
        if self.seq_length < 2:
            raise ValueError(f"seq_length is {self.seq_length}; give at least 2 tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRules(Config):
    """Which files of a tree are text worth training on."""

    extensions: tuple[str, ...] = tuple(CODE_EXTENSIONS.split())
    """File name endings that are kept, with the dot; empty keeps every name."""
    skip_directories: tuple[str, ...] = (
        "__pycache__",
        "node_modules",
        "site-packages",
        "dist-packages",
        "third_party",
        "vendor",
        "vendored",
        ".git",
        ".tox",
        ".venv",
    )
    """Directory names that are never entered."""
    max_file_bytes: int = 1 << 20
    """Larger files are left out."""
    max_line_bytes: int = 4000
    """A longer line marks a file as minified or as data (our choice of bound)."""
    max_mean_line_bytes: int = 200
    """A longer mean line marks a file as minified or as data (our choice of bound)."""
    keep_generated: bool = False
    """Keep files whose head says that a program wrote them."""

    def __post_init__(self) -> None:
        for extension in self.extensions:
            if not extension.startswith("."):
                raise ValueError(f"extensions has {extension!r}; write it with its dot")
        for name in ("max_file_bytes", "max_line_bytes", "max_mean_line_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1 byte")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig(Config):
    """Licence and secret filters."""

    licenses: tuple[str, ...] = ()
    """SPDX identifiers that are allowed, compared without case; `NOASSERTION` allows files of
    unknown licence. Empty: no licence filter."""
    secrets: Literal["redact", "drop", "off"] = "redact"
    """What happens to a file with a key or a password: its bytes are replaced, it is dropped, or
    nothing is looked for."""
    min_entropy_bits: float = 3.5
    """Shannon entropy per character from which a value assigned to a name such as `password` or
    `api_key` counts as a secret (our choice)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedupConfig(Config):
    """Removal of repeated files."""

    exact: bool = True
    """Drop files whose bytes were seen before."""
    near: bool = True
    """Drop near-duplicates too: MinHash, LSH, and the true Jaccard similarity at the end."""
    threshold: float = 0.8
    """Jaccard similarity of the word shingles from which a file is a near-duplicate."""
    shingle_words: int = 5
    """Consecutive words in one shingle."""
    permutations: int = 128
    """Hash functions of the signature."""
    bands: int = 25
    """LSH bands of `permutations // bands` rows; two files are compared when one band agrees."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; give a similarity in (0, 1]")
        if self.shingle_words < 1:
            raise ValueError(f"shingle_words is {self.shingle_words}; give at least 1")
        if not 1 <= self.bands <= self.permutations:
            raise ValueError(
                f"bands is {self.bands} with {self.permutations} permutations; "
                "give between 1 and permutations"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FimConfig(Config):
    """Fill-in-the-middle transform (Bavarian et al. 2022)."""

    rate: float = 0.0
    """Share of training documents that are transformed; 0 turns it off."""
    spm_frac: float = 0.5
    """Share of those in suffix-prefix-middle order; the rest is prefix-suffix-middle."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a share in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig(Config):
    """How a dataset is made from files."""

    out: str
    """Directory that receives train.bin/.idx, heldout.bin/.idx and dataset.json."""
    source: Literal["none", "stdlib"] = "none"
    """`stdlib` reads the standard library of the running Python."""
    repo: tuple[str, ...] = ()
    """Git checkouts (tracked files) or plain directories (every file)."""
    include_tests: bool = False
    """Keep the test directories of the standard library; other sources are not affected."""
    tokenizer: str = "byte"
    """`byte`, or the path of a Hugging Face `tokenizer.json`."""
    eod_token: str | None = None
    """End-of-document token; None takes the first known name that the tokenizer has."""
    heldout_frac: float = 0.05
    """Share of the files held out, chosen by a hash of the path; 0 writes no held-out set."""
    seed: int = 0
    """Seed of the held-out choice and of fill-in-the-middle."""
    files: FileRules = FileRules()
    filters: FilterConfig = FilterConfig()
    dedup: DedupConfig = DedupConfig()
    fim: FimConfig = FimConfig()
    force: bool = False
    """Replace a dataset in `out` that was made from other inputs or with other settings."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out is empty; name the directory of the dataset")
        if self.source == "none" and not self.repo:
            raise ValueError("nothing to read; give --source stdlib or --repo PATH")
        if not 0 <= self.heldout_frac < 1:
            raise ValueError(f"heldout_frac is {self.heldout_frac}; give a share in [0, 1)")
