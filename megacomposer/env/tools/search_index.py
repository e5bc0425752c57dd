"""Semantic search: a BM25 index over the workspace, with an embedding beside it where there is one.

Files are read through the sandbox and cut into chunks at definitions. The index lives on the host
and follows the workspace: before each query, files whose size, change time or inode differ are
read again, and cut again where their content is new.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from megacomposer.env.sandbox import ExecResult, Sandbox, SandboxError, Status
from megacomposer.env.tools.find import NO_GIT, RIPGREP
from megacomposer.env.tools.schema import Arguments, Tool, ToolError

MAX_FILE_BYTES = 256 << 10
MAX_FILES = 20_000
MAX_TOTAL_BYTES = 64 << 20
CHUNK_LINES = 40
"""Where no definition starts, a chunk ends here."""
_READ_BATCH_BYTES = 2 << 20
"""Read in one command, or half of what a command may write, if that is less."""
_TIMEOUT_S = 120.0
_RANK_OFFSET = 60.0
"""Of reciprocal rank fusion: Cormack, Clarke and Buettcher, SIGIR 2009."""
_PER_FILE = 3

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_DEFINITION = re.compile(
    r"(?:    |\t|  )?(?:export |default |public |private |protected |static |abstract |final |"
    r"async |pub(?:\([a-z]+\))? |unsafe |inline |virtual )*"
    r"(?:def|class|func|fn|function|interface|struct|enum|trait|impl|module|namespace|type)\b[ (]"
)
_ATTACHED = re.compile(r"\s*(?:@|#|//|/\*|\*|\*/)")


class Embedder(Protocol):
    """A model that turns texts into vectors."""

    async def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[len(texts), dimension]; rows need no unit length."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Lines of a file that belong together."""

    path: str
    start: int
    """First line, from 1."""
    text: str

    @property
    def end(self) -> int:
        return self.start + self.text.count("\n")


@dataclasses.dataclass(kw_only=True)
class _File:
    stamp: str
    digest: bytes
    chunks: list[Chunk]
    token_ids: list[list[int]]
    vectors: npt.NDArray[np.float32] | None = None


class SemanticSearch(Arguments, frozen=True, kw_only=True):
    query: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=2000,
            description="What the code does, in words or identifiers.",
        ),
    ]
    glob: Annotated[
        str, Meta(max_length=1000, description="Only paths that match, such as `src/*.py`.")
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=20, description="Results at most.")] = 8


class SearchIndex:
    """The tool and its index over one sandbox."""

    def __init__(self, sandbox: Sandbox, *, embedder: Embedder | None = None) -> None:
        self._sandbox, self._embedder = sandbox, embedder
        self._files: dict[str, _File] = {}
        self._vocabulary: dict[str, int] = {}
        self._chunks: list[Chunk] = []
        self._scorer: Any = None
        self._left_out = 0
        self._refreshing = asyncio.Lock()

    def tools(self) -> tuple[Tool, ...]:
        size = f"{MAX_FILE_BYTES >> 10} KiB"
        return (
            Tool(
                name="semantic_search",
                description="Find the parts of the repository that are about something, best"
                f" first. Text files up to {size} that .gitignore does not leave out.",
                arguments=SemanticSearch,
                run=self._run,
                reads_only=True,
                programs=("rg", "stat", "tar", "xargs"),
            ),
        )

    async def _run(self, arguments: SemanticSearch) -> str:
        async with self._refreshing:
            await self._refresh()
            found = await self._search(arguments)
        if not found:
            return "Nothing in the repository has these words; try others, or grep."
        parts = []
        for chunk in found:
            lines = chunk.text.split("\n")
            shown = "\n".join(line[:200] for line in lines[:15])
            more = f"\n[{len(lines) - 15} more lines]" if len(lines) > 15 else ""
            parts.append(f"{chunk.path}:{chunk.start}-{chunk.end}\n{shown}{more}")
        if self._left_out:
            parts.append(f"[{self._left_out} files beyond the size of the index were not searched]")
        return "\n\n".join(parts)

    async def _refresh(self) -> None:
        """Bring the index up to the workspace as it is now."""
        stamps, sizes = await self._list()
        changed = [path for path, stamp in stamps.items() if self._stamp(path) != stamp]
        gone = [path for path in self._files if path not in stamps]
        for path in gone:
            del self._files[path]
        fresh = bool(gone)
        room = min(_READ_BATCH_BYTES, self._sandbox.spec.limits.output_bytes // 2)
        for batch in _batches(changed, sizes, room):
            contents = await self._read(batch)
            for path in batch:
                data = contents.get(path)
                if data is None:
                    fresh |= self._files.pop(path, None) is not None  # it went away meanwhile
                    continue
                digest = hashlib.sha256(data).digest()
                old = self._files.get(path)
                if old and old.digest == digest:
                    old.stamp = stamps[path]
                    continue
                self._files[path] = await asyncio.to_thread(
                    self._make_file, path, stamps[path], digest, data
                )
                fresh = True
        if fresh or self._scorer is None:
            self._files = dict(sorted(self._files.items()))
            self._chunks = [chunk for file in self._files.values() for chunk in file.chunks]
            await asyncio.to_thread(self._score_words)

    def _stamp(self, path: str) -> str:
        return self._files[path].stamp if path in self._files else ""

    async def _list(self) -> tuple[dict[str, str], dict[str, int]]:
        """Stamp and size of every file to index."""
        listed = await self._exec(
            [*RIPGREP, "--files", "--null", f"--max-filesize={MAX_FILE_BYTES}", NO_GIT]
        )
        names = listed.stdout.split(b"\0")[:-1]
        self._left_out = max(0, len(names) - MAX_FILES)
        names = names[:MAX_FILES]
        # A change time cannot be set back, unlike a modification time.
        command = ["xargs", "-0", "-r", "stat", "--printf", r"%s %.9Z %i %n\0", "--"]
        described = await self._exec(command, stdin=b"\0".join(names))
        stamps: dict[str, str] = {}
        sizes: dict[str, int] = {}
        total = 0
        for row in described.stdout.split(b"\0")[:-1]:
            size, changed, inode, name = row.split(b" ", 3)
            try:
                path = name.decode()
            except UnicodeDecodeError:
                continue  # no name of it could be shown to the agent
            total += int(size)
            if total > MAX_TOTAL_BYTES:
                self._left_out += 1
                continue
            stamps[path] = f"{size.decode()} {changed.decode()} {inode.decode()}"
            sizes[path] = int(size)
        return stamps, sizes

    async def _read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Content of the regular files among them, in one command."""
        names = b"\0".join(path.encode() for path in paths)
        command = ["tar", "--create", "--file=-", "--null", "--verbatim-files-from"]
        command += [
            "--no-recursion",
            "--hard-dereference",
            "--ignore-failed-read",
            "--files-from=-",
        ]
        result = await self._exec(command, stdin=names)
        contents: dict[str, bytes] = {}
        # tar pads its output; a member that changed while it was read is whole all the same.
        with tarfile.open(fileobj=io.BytesIO(result.stdout), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isreg() else None
                if stream:
                    contents[member.name] = stream.read()
        return contents

    async def _exec(self, command: list[str], *, stdin: bytes = b"") -> ExecResult:
        result = await self._sandbox.exec(command, stdin=stdin, timeout_s=_TIMEOUT_S)
        if result.status is Status.TIMEOUT:
            raise ToolError("timeout", "The repository takes too long to index; use grep.")
        if result.status is not Status.EXITED:
            raise ToolError("limit", f"Indexing was stopped ({result.status}); use grep.")
        if result.exit_code in (126, 127):
            message = result.stderr.decode("utf-8", "replace")[:500]
            raise SandboxError(f"semantic_search cannot start {command[0]}: {message}")
        return result

    def _make_file(self, path: str, stamp: str, digest: bytes, data: bytes) -> _File:
        chunks = list(cut(path, data.decode("utf-8", "replace"))) if b"\0" not in data else []
        token_ids = [
            [
                self._vocabulary.setdefault(token, len(self._vocabulary))
                for token in tokens(f"{path}\n{chunk.text}")
            ]
            for chunk in chunks
        ]
        return _File(stamp=stamp, digest=digest, chunks=chunks, token_ids=token_ids)

    def _score_words(self) -> None:
        token_ids = [ids for file in self._files.values() for ids in file.token_ids]
        self._scorer = make_scorer(token_ids, self._vocabulary) if self._chunks else None

    async def _search(self, arguments: SemanticSearch) -> list[Chunk]:
        if not self._chunks:
            return []
        allowed = np.array([_matches(chunk.path, arguments.glob) for chunk in self._chunks])
        known = {self._vocabulary[t] for t in tokens(arguments.query) if t in self._vocabulary}
        scores = word_scores(self._scorer, sorted(known), len(self._chunks))
        rankings = [_ranking(np.where(allowed, scores, 0.0), 0.0)]
        if self._embedder:
            likeness = await self._likeness(self._embedder, arguments.query)
            rankings.append(_ranking(np.where(allowed, likeness, -np.inf), -np.inf))
        order = fuse(rankings)
        found: list[Chunk] = []
        for position in order:
            chunk = self._chunks[position]
            if sum(other.path == chunk.path for other in found) < _PER_FILE:
                found.append(chunk)
            if len(found) == arguments.limit:
                break
        return found

    async def _likeness(self, embedder: Embedder, query: str) -> npt.NDArray[np.float32]:
        """Cosine of the query and each chunk; vectors are kept with their file."""
        for file in self._files.values():
            if file.vectors is None and file.chunks:
                file.vectors = _unit(await embedder.embed([chunk.text for chunk in file.chunks]))
        wanted = _unit(await embedder.embed([query]))[0]
        vectors = [file.vectors for file in self._files.values() if file.vectors is not None]
        return np.asarray(np.concatenate(vectors) @ wanted, dtype=np.float32)


def tokens(text: str) -> list[str]:
    """Lower-case words; an identifier gives itself and its camelCase and snake_case parts."""
    found = []
    for word in _WORD.findall(text):
        parts = [part.lower() for part in _PART.findall(word)]
        found += [part for part in parts if len(part) > 1]
        if len(parts) > 1:
            found.append(word.lower())
    return found


def cut(path: str, text: str) -> Iterator[Chunk]:
    """Chunks that start at definitions (with decorators and comments above), or every
    CHUNK_LINES lines; chunks of white space are left out."""
    lines = text.split("\n")
    starts = {0}
    for number, line in enumerate(lines):
        if _DEFINITION.match(line):
            first = number
            while first and _ATTACHED.match(lines[first - 1]):
                first -= 1
            starts.add(first)
    bounds = [*sorted(starts), len(lines)]
    for first, last in zip(bounds, bounds[1:], strict=False):
        for start in range(first, last, CHUNK_LINES):
            body = "\n".join(lines[start : min(start + CHUNK_LINES, last)]).rstrip()
            if body.strip():
                yield Chunk(path=path, start=start + 1, text=body)


def make_scorer(token_ids: list[list[int]], vocabulary: dict[str, int]) -> Any:
    """A BM25 index (Lucene's variant) over chunks of token ids."""
    import bm25s  # an import of 0.2 s that a tool set without this tool does not need

    scorer = bm25s.BM25(method="lucene")
    scorer.index((token_ids, dict(vocabulary)), show_progress=False)
    return scorer


def word_scores(scorer: Any, token_ids: list[int], chunks: int) -> npt.NDArray[np.float32]:
    """The score of each chunk for these tokens; 0 is no token in common."""
    if not token_ids:
        return np.zeros(chunks, dtype=np.float32)
    scores: npt.NDArray[np.float32] = scorer.get_scores_from_ids(token_ids)
    return scores


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Reciprocal rank fusion; one ranking stays as it is."""
    total: dict[int, float] = {}
    for ranking in rankings:
        for rank, position in enumerate(ranking, 1):
            total[position] = total.get(position, 0.0) + 1.0 / (_RANK_OFFSET + rank)
    return sorted(total, key=lambda position: (-total[position], position))


def _ranking(scores: npt.NDArray[np.float32], floor: float) -> list[int]:
    """Positions above the floor, best first, at most 200."""
    order = np.argsort(-scores, kind="stable")[:200]
    return [int(position) for position in order if scores[position] > floor]


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _matches(path: str, glob: str) -> bool:
    return not glob or fnmatchcase(path, glob) or fnmatchcase(f"/{path}", f"*/{glob}")


def _batches(paths: Sequence[str], sizes: dict[str, int], room: int) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for path in paths:
        cost = sizes[path] + 2048  # a header and padding
        if batch and held + cost > room:
            yield batch
            batch, held = [], 0
        batch.append(path)
        held += cost
    if batch:
        yield batch
