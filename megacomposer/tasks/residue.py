"""Looks for the deleted code in every byte that an agent could read.

Plain bytes, UTF-16, Python's marshal strings; inside gzip, zlib, bzip2, xz, zip (wheels, jars) and
tar, nested, also where such a stream lies in the middle of another file (git packs, caches).

What counts as residue of deleted code:

- a file that no clean tree has, such as bytecode or a cache, whatever is in it;
- lines of the implementation that no kept source file has: three in one place, or all there are;
- a deleted name, as a word of its own, outside the files that may refer to it: the tests, the
  documentation and the code of the task's tree, and their copies as git objects.
"""

from __future__ import annotations

import base64
import bz2
import csv
import dataclasses
import hashlib
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Kind, Symbol
from megacomposer.tasks.deletion import code_line_numbers
from megacomposer.tasks.scrub import is_residue

MIN_LINE_CHARS = 20
"""Shorter lines of code are nobody's in particular."""
MIN_LINES = 3
MIN_NAME_CHARS = 4
MAX_DEPTH = 8
"""Archives within archives."""
MAX_UNPACKED_BYTES = 1 << 30
"""Of one file, all levels together."""
_ZLIB = re.compile(rb"[\x08\x18\x28\x38\x48\x58\x68\x78][\x01\x5e\x9c\xda]")
_MAGIC = re.compile(rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\x00|PK\x03\x04")


class ScanLimitError(ValueError):
    """A file unpacks to more than the scan reads, or is nested too deep; names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
    """What must not be found."""

    lines: tuple[bytes, ...]
    """Lines of code without their indentation."""
    """They count from MIN_LINES in one place, or if all of them are there."""
    names: Mapping[bytes, frozenset[str]]
    """Name -> files of the workspace that may hold it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One trace that was found."""

    path: str
    """File, then `!` and the place inside for each level of packing."""
    trace: str
    encoding: str
    """One of "plain", "utf-16", "marshal"; "path" where the file should not exist at all."""


def traces_of(
    graph: CallGraph,
    symbols: Iterable[str],
    modules: Iterable[str],
    tree: Path,
    source_files: Sequence[str],
) -> Traces:
    """Traces of deleted symbols; `tree` is what is left, and decides what is distinctive.

    `source_files` are the kept Python files of package and tests, relative to `tree`.
    """
    texts = {
        place: data
        for place, data in files_of_tree(tree)
        if not place.startswith(".git/") and not _residue_path(place) and _looks_like_text(data)
    }
    # As parts of lines too: `y = x` is no trace while `my = x` stays.
    kept = b"\n".join(texts[file] for file in source_files)
    # A name that is also a file's name stands in git's own lists of files.
    stems = {part.partition(".")[0] for place in texts for part in place.split("/")}
    lines: set[bytes] = set()
    names = {name for name in modules if "." in name}
    for id in symbols:
        symbol = graph.symbols[id]
        lines.update(line for line in _code_of(graph, symbol) if line not in kept)
        names.update(name for name in _names_of(graph, symbol) if name not in stems)
    return Traces(
        lines=tuple(sorted(lines)),
        names={
            name.encode(): frozenset(
                place for place, data in texts.items() if _has_word(data, name.encode())
            )
            for name in sorted(names)
        },
    )


def _code_of(graph: CallGraph, symbol: Symbol) -> Iterator[bytes]:
    text = graph.modules[symbol.module].source.splitlines()
    for number in code_line_numbers(symbol, text):
        line = text[number - 1].strip()
        # An import or a decorator alone says nothing.
        if len(line) >= MIN_LINE_CHARS and not line.startswith(("import ", "from ", "@")):
            yield line.encode()


def _names_of(graph: CallGraph, symbol: Symbol) -> Iterator[str]:
    methods = graph.methods(symbol.id) if symbol.kind is Kind.CLASS else []
    for name in [symbol.name, *(method.name for method in methods)]:
        if len(name) >= MIN_NAME_CHARS and not name.startswith("__"):
            yield name


# Scanning ---------------------------------------------------------------------------------------

Part = tuple[str, bytes]
"""A place (a path, then `!` and a name for each level of packing) and its bytes."""


def image_parts(files: Iterable[Part]) -> list[Part]:
    """Files and all that is packed in them, to scan for the traces of many tasks.

    Raises ScanLimitError.
    """
    parts: list[Part] = []
    for path, data in files:
        total = 0
        for place, part, depth in _unpacked(path, data):
            total += len(part)
            if total > MAX_UNPACKED_BYTES or depth > MAX_DEPTH:
                raise ScanLimitError(f"{path}: too large or too deep to scan at {place}")
            parts.append((place, part))
    return parts


def files_of_layer(file: Path) -> Iterator[Part]:
    """The files of an exported layer as an agent sees them: `workspace/` is left out of paths."""
    with tarfile.open(file) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            data = content.read() if content else member.linkname.encode()
            yield member.name.removeprefix("workspace/"), data


def files_of_tree(tree: Path) -> Iterator[Part]:
    """The files of a directory, such as the packages that a task mounts."""
    for path in sorted(tree.rglob("*")):
        if path.is_symlink():
            yield path.relative_to(tree).as_posix(), str(path.readlink()).encode()
        elif path.is_file():
            yield path.relative_to(tree).as_posix(), path.read_bytes()


def scan_workspace(traces: Traces, parts: Iterable[Part]) -> list[Finding]:
    """The task's tree, `.git` included."""
    parts = list(parts)
    allowed = frozenset().union(*traces.names.values()) if traces.names else frozenset()
    blobs: dict[str, set[str]] = {}
    found: list[Finding] = []
    for place, data in parts:
        if place in allowed:
            blobs.setdefault(hashlib.sha256(data).hexdigest(), set()).add(place)
        if "!" not in place and _residue_path(place):
            found.append(Finding(path=place, trace=place, encoding="path"))
    for place, data in parts:
        content = _git_content(data) if place.startswith(".git/") else data
        origins = blobs.get(hashlib.sha256(content).hexdigest(), {place})
        found += _search(traces, place, data, origins)
    return found


def scan_site(
    traces: Traces, parts: Iterable[Part], import_names: Sequence[str], published: Set[str]
) -> list[Finding]:
    """A directory of dependencies: no copy of the package itself, no bytecode, no trace.

    Names are allowed in `published` files (`published_files`): other projects' own.
    """
    found: list[Finding] = []
    for place, data in parts:
        file = place.partition("!")[0]
        if file.partition("/")[0].removesuffix(".py") in import_names or file.endswith(
            (".pyc", ".pyo", ".egg-link", ".pth")
        ):
            found.append(Finding(path=place, trace=file, encoding="path"))
        found += _search(traces, place, data, None if file in published else {place})
    return found


def published_files(site: Path) -> set[str]:
    """Files of `site` that an installed distribution lists with the digest that they have, and
    the lists themselves."""
    published: set[str] = set()
    for record in site.glob("*.dist-info/RECORD"):
        published.add(record.relative_to(site).as_posix())
        for name, digest, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
            kind, _, value = digest.partition("=")
            path = site / name
            if kind == "sha256" and path.is_file():
                actual = hashlib.sha256(path.read_bytes()).digest()
                if base64.urlsafe_b64encode(actual).rstrip(b"=").decode() == value:
                    published.add(name)
    return published


def _residue_path(place: str) -> bool:
    parts = place.split("/")
    if parts[0] == ".git":
        return False
    folders = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return any(is_residue(folder, directory=True) for folder in folders) or is_residue(
        place, directory=False
    )


def _search(traces: Traces, place: str, data: bytes, origins: Set[str] | None) -> Iterator[Finding]:
    """`origins` are the files that these bytes stand for; None: names are not looked for."""
    lines = [(line, how) for line in traces.lines if (how := _encoding(line, data))]
    if traces.lines and len(lines) >= min(MIN_LINES, len(traces.lines)):
        for line, how in lines:
            yield Finding(path=place, trace=line.decode(), encoding=how)
    if origins is None:
        return
    for name, allowed in traces.names.items():
        if not origins & allowed and (how := _encoding(name, data, word=True)):
            yield Finding(path=place, trace=name.decode(), encoding=how)


def _encoding(needle: bytes, data: bytes, *, word: bool = False) -> str:
    """How `needle` stands in `data`; "" where it does not."""
    if needle in data:
        if not word or _has_word(data, needle):
            return "plain"
        if _marshal(needle).search(data):
            return "marshal"
    text = needle.decode()
    wide = any(text.encode(code) in data for code in ("utf-16-le", "utf-16-be"))
    return "utf-16" if wide else ""


def _has_word(data: bytes, name: bytes) -> bool:
    if name not in data:
        return False
    return (
        re.search(rb"(?<![A-Za-z0-9_])" + re.escape(name) + rb"(?![A-Za-z0-9_])", data) is not None
    )


def _marshal(name: bytes) -> re.Pattern[bytes]:
    """As a string constant of bytecode or a pickle: type byte, length, characters."""
    short = bytes([len(name) & 0xFF])
    long = len(name).to_bytes(4, "little")
    return re.compile(
        rb"(?:[zZ\xda\xfa]|\x8c)"
        + re.escape(short + name)
        + rb"|[aAutXs\xe1\xc1\xf5\xf4\xf3]"
        + re.escape(long + name),
        re.DOTALL,
    )


def _git_content(data: bytes) -> bytes:
    """A git object without its header; other bytes as they are."""
    head, separator, rest = data[:64].partition(b"\0")
    if separator and re.fullmatch(rb"(blob|tree|commit|tag) \d+", head):
        return data[len(head) + 1 :]
    return data


# Unpacking --------------------------------------------------------------------------------------


def _unpacked(path: str, data: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(place, bytes, depth) of a file and of everything that is packed in it."""
    stack = [(path, data, 0)]
    while stack:
        place, part, depth = stack.pop()
        yield place, part, depth
        if depth <= MAX_DEPTH:
            stack += [(f"{place}!{name}", inner, depth + 1) for name, inner in _members(part)]


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    if data[257:262] == b"ustar":
        yield from _tar_members(data)
        return
    if data[:4] in (b"PK\x03\x04", b"PK\x05\x06") and zipfile.is_zipfile(io.BytesIO(data)):
        yield from _zip_members(data)
    for match in _MAGIC.finditer(data):
        yield from _stream_at(data, match.start(), match.group())
    if _looks_like_text(data):
        return
    view = memoryview(data)
    end = 0
    for match in _ZLIB.finditer(data):
        at = match.start()
        if at < end or int.from_bytes(data[at : at + 2], "big") % 31:
            continue
        inner, used = _inflate(view[at:], zlib.MAX_WBITS)
        if inner:
            end = at + used
            yield f"zlib@{at}", inner


def _looks_like_text(data: bytes) -> bool:
    head = data[:4096]
    return b"\0" not in head and all(byte >= 32 or byte in b"\t\n\r\f\x1b" for byte in head)


def _stream_at(data: bytes, at: int, magic: bytes) -> Iterator[tuple[str, bytes]]:
    rest = data[at:]
    if magic.startswith(b"\x1f\x8b"):
        inner, _ = _inflate(rest, zlib.MAX_WBITS | 16)
        name = "gzip"
    elif magic.startswith(b"PK"):
        inner, name = _zip_entry(rest), "zip"
    else:
        bzip = magic.startswith(b"BZh")
        inner, name = _decompress(rest, bz2.BZ2Decompressor() if bzip else lzma.LZMADecompressor())
    if inner:
        yield f"{name}@{at}", inner


def _decompress(
    rest: bytes, decompressor: bz2.BZ2Decompressor | lzma.LZMADecompressor
) -> tuple[bytes, str]:
    name = type(decompressor).__name__.removesuffix("Decompressor").lower()
    try:
        return decompressor.decompress(rest, MAX_UNPACKED_BYTES), name
    except (OSError, lzma.LZMAError):
        return b"", name


def _inflate(rest: bytes | memoryview, window: int) -> tuple[bytes, int]:
    """What inflates from the start of `rest`, also of a stream cut short, and its length."""
    decompressor = zlib.decompressobj(window)
    out = bytearray()
    position = 0
    step = 1 << 12
    try:
        while position < len(rest) and not decompressor.eof and len(out) <= MAX_UNPACKED_BYTES:
            out += decompressor.decompress(rest[position : position + step])
            position += step
            step = min(step * 2, 1 << 20)
    except zlib.error:
        # Damaged in the middle: what came out before is still readable.
        pass
    return bytes(out), min(position, len(rest)) - len(decompressor.unused_data)


def _zip_entry(rest: bytes) -> bytes:
    """One member from its local header: also of a zip file without a directory."""
    if len(rest) < 30 or int.from_bytes(rest[8:10], "little") != zipfile.ZIP_DEFLATED:
        return b""
    start = 30 + int.from_bytes(rest[26:28], "little") + int.from_bytes(rest[28:30], "little")
    return _inflate(rest[start:], -zlib.MAX_WBITS)[0]


def _zip_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        for info in opened.infolist():
            if info.is_dir():
                continue
            try:
                yield info.filename, opened.read(info)
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error) as error:
                raise ScanLimitError(
                    f"zip member {info.filename} is unreadable: {error}"
                ) from error


def _tar_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as opened:
            for member in opened:
                content = opened.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content.read()
    except tarfile.TarError as error:
        raise ScanLimitError(f"tar archive is unreadable: {error}") from error
