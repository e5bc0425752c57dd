"""Makes a dataset: files -> filters -> duplicates -> split by file -> tokens -> `.bin/.idx`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megacomposer.data.config import PrepareConfig
from megacomposer.data.dedup import deduplicate
from megacomposer.data.filters import make_filter
from megacomposer.data.fim import encode_with_fim, require_fim
from megacomposer.data.indexed import (
    IndexedWriter,
    idx_path,
    incomplete_path,
    sync_directory,
    token_dtype,
    write_error,
    write_synced,
)
from megacomposer.data.manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    check_files,
    manifest_path,
    read_manifest,
)
from megacomposer.data.sources import (
    Document,
    Funnel,
    iter_documents,
    stdlib_root,
    stdlib_rules,
)
from megacomposer.data.tokenizer import Tokenizer, control_ids, load_tokenizer

logger = logging.getLogger(__name__)

PIPELINE_VERSION = 1
"""Raised when the same inputs and settings give other tokens than before."""

SPLITS = ("train", "heldout")


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Make the dataset that `config` describes, and return a summary as plain JSON values.

    `<out>/dataset.json` is written last and vouches for the rest: it has the settings, the counts,
    and size and SHA-256 of every file. When it already describes the same inputs and settings and
    the files are as it says, nothing is written (`"status": "up_to_date"`). A dataset of other
    inputs is only replaced with `force`.

    Documents are held in memory: a corpus has to fit there. Raises ValueError for inputs and
    settings that make no dataset, and OSError naming the file when one cannot be written; files
    that were there before are then still whole.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(config.tokenizer, eod_token=config.eod_token)
    require_fim(tokenizer, config.fim)
    out = Path(config.out)
    with _locked(out):
        funnel = Funnel()
        documents = _read_documents(config, funnel)
        inputs = _inputs_hash(documents, config, tokenizer)
        status, manifest = "up_to_date", _current_manifest(out, inputs, force=config.force)
        if manifest is None:
            status = "written"
            manifest = _build(documents, config, tokenizer, funnel, inputs, out)
    return {
        "event": "prepare_data",
        "status": status,
        "out": config.out,
        "tokenizer": config.tokenizer,
        "splits": manifest["splits"],
        "funnel": manifest["funnel"],
        "notes": manifest["notes"],
        "seconds": round(time.monotonic() - started, 2),
    }


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Holds `out` against a second writer, for as long as this process lives at most."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise write_error(error, out) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process is preparing data in {out}; wait for it") from error
    else:
        yield
    finally:
        os.close(descriptor)  # drops the lock


def _read_documents(config: PrepareConfig, funnel: Funnel) -> list[Document]:
    """Every file of every source that the file rules and the filters leave, in order."""
    trees = [(Path(path), Path(path).resolve().name, config.files) for path in config.repo]
    if config.source == "stdlib":
        rules = stdlib_rules(config.files, include_tests=config.include_tests)
        trees.insert(0, (stdlib_root(), "stdlib", rules))
    documents: list[Document] = []
    names: dict[str, int] = {}
    for root, base, rules in trees:
        # two checkouts may have the same directory name, but a document's key has to be unique
        names[base] = names.get(base, 0) + 1
        name = base if names[base] == 1 else f"{base}#{names[base]}"
        apply = make_filter(config.filters, root)
        for document in iter_documents(root, rules, funnel, name=name):
            reason, text, note = apply(document.path, document.text)
            if note is not None:
                funnel.count(note, len(document.text))
            if reason is not None:
                funnel.count(reason, len(document.text))
                continue
            documents.append(Document(source=name, path=document.path, text=text))
    if not documents:
        raise ValueError(f"the filters left no document; files by rule: {funnel}")
    return documents


def _inputs_hash(documents: list[Document], config: PrepareConfig, tokenizer: Tokenizer) -> str:
    """Hash of all that fixes the output: settings, tokenizer, and name and content of each file."""
    settings = _settings(config)
    head = json.dumps([PIPELINE_VERSION, settings, tokenizer.fingerprint()], sort_keys=True)
    digest = hashlib.sha256(head.encode())
    for document in documents:
        key = os.fsencode(document.key)
        digest.update(hashlib.sha256(key).digest() + hashlib.sha256(document.text).digest())
    return digest.hexdigest()


def _settings(config: PrepareConfig) -> dict[str, Any]:
    """The settings that fix the result; where things lie does not, and a tokenizer has its hash."""
    settings = config.to_dict()
    for name in ("out", "force", "repo", "tokenizer", "eod_token"):
        del settings[name]
    return settings


def _current_manifest(out: Path, inputs: str, *, force: bool) -> dict[str, Any] | None:
    """The manifest of `out` when it is what would be built again; None when there is work to do."""
    if force:
        return None
    unfinished = incomplete_path(manifest_path(out)).exists()
    manifest = None if unfinished and not manifest_path(out).exists() else read_manifest(out)
    if manifest is None:
        present = [s for s in SPLITS if idx_path(out / s).exists()]
        if present and not unfinished:
            raise ValueError(
                f"{idx_path(out / present[0])} exists without a {MANIFEST_NAME}, so it is not ours "
                "to replace; choose another --out, or --force to overwrite it"
            )
        return None
    if manifest["inputs"] != inputs:
        raise ValueError(
            f"{manifest_path(out)} describes a dataset of other inputs or settings; "
            "choose another --out, or --force to replace it"
        )
    check_files(out, manifest, checksums=True)
    return manifest


def is_heldout(key: str, *, seed: int, heldout_frac: float) -> bool:
    """Whether the document `key` is held out: a hash of its name, not of its content or position.

    So a file stays on its side when others come or go.
    """
    digest = hashlib.blake2b(os.fsencode(key), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") < heldout_frac * 2.0**64


def _build(
    documents: list[Document],
    config: PrepareConfig,
    tokenizer: Tokenizer,
    funnel: Funnel,
    inputs: str,
    out: Path,
) -> dict[str, Any]:
    kept = deduplicate(documents, config.dedup, funnel)
    dtype = token_dtype(tokenizer.vocab_size)
    splits = SPLITS if config.heldout_frac else SPLITS[:1]
    text_bytes = dict.fromkeys(splits, 0)
    with contextlib.ExitStack() as stack:
        writers = {s: stack.enter_context(IndexedWriter(out / s, dtype)) for s in splits}
        for index, document in enumerate(kept):
            split = "train"
            if is_heldout(document.key, seed=config.seed, heldout_frac=config.heldout_frac):
                split = "heldout"
            ids = _encode(document, index, split, config, tokenizer, funnel)
            if ids is not None:
                writers[split].add_document(ids)
                text_bytes[split] += len(document.text)
        _check_not_empty(writers, config, funnel)
        for writer in writers.values():
            writer.seal()
        manifest = _manifest(config, tokenizer, funnel, inputs, writers, text_bytes)
        _publish(out, writers, manifest)
    return manifest


def _encode(
    document: Document,
    index: int,
    split: str,
    config: PrepareConfig,
    tokenizer: Tokenizer,
    funnel: Funnel,
) -> np.ndarray | None:
    """Ids of a document with its end-of-document id, or None for one that is left out."""
    try:
        ids = tokenizer.encode(document.text)
    except UnicodeDecodeError:
        funnel.count("not_utf8", len(document.text))
        return None
    if np.isin(ids, control_ids(tokenizer)).any():
        funnel.count("control_token_in_text", len(document.text))
        return None
    if split == "train" and config.fim.rate:
        ids = encode_with_fim(document.text, index, tokenizer, config.fim, seed=config.seed)
    return np.append(ids, np.int32(tokenizer.eod_id))


def _check_not_empty(
    writers: dict[str, IndexedWriter], config: PrepareConfig, funnel: Funnel
) -> None:
    for split, writer in writers.items():
        if not writer.documents:
            raise ValueError(
                f"no document for {split} with heldout_frac {config.heldout_frac} and seed "
                f"{config.seed}; add files, change the share or the seed (files by rule: {funnel})"
            )


def _manifest(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    funnel: Funnel,
    inputs: str,
    writers: dict[str, IndexedWriter],
    text_bytes: dict[str, int],
) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for writer in writers.values():
        files |= writer.checksums()
    return {
        "version": MANIFEST_VERSION,
        "pipeline": PIPELINE_VERSION,
        "inputs": inputs,
        "seed": config.seed,
        "tokenizer": {
            "spec": tokenizer.spec,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "splits": {
            split: {
                "documents": writer.documents,
                "text_bytes": text_bytes[split],
                "tokens": writer.tokens,
            }
            for split, writer in writers.items()
        },
        "funnel": funnel.to_dict(),
        "notes": funnel.notes,
        "files": files,
        "settings": _settings(config),
    }


def _publish(out: Path, writers: dict[str, IndexedWriter], manifest: dict[str, Any]) -> None:
    """Replace the old dataset by the sealed one.

    The new manifest is on disk under its incomplete name before the first rename and gets its real
    name after the last: whoever comes in between finds no manifest but that sign, and refuses.
    """
    path = manifest_path(out)
    content = (json.dumps(manifest, indent=1) + "\n").encode()
    try:
        write_synced(incomplete_path(path), content)
        path.unlink(missing_ok=True)
        sync_directory(out)
        for writer in writers.values():
            writer.publish()
        for split in set(SPLITS) - writers.keys():  # a held-out set of the dataset before
            for old in (idx_path(out / split), (out / split).with_suffix(".bin")):
                old.unlink(missing_ok=True)
        os.replace(incomplete_path(path), path)
        sync_directory(out)
    except OSError as error:
        raise write_error(error, path) from error
    logger.info("wrote %s", path)
