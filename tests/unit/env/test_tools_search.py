"""Semantic search: what is found, and that the index follows the workspace."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacomposer.env.tools.search_index import CHUNK_LINES, cut, fuse, tokens
from tool_cases import Bench, open_bench, run

CONFIG = '''"""Settings."""
import json


class SettingsLoader:
    """Loads configuration from disk."""

    @staticmethod
    def parseTimeout(text):
        # how long to wait for a server
        return float(text)

    def load_file(self, path):
        return json.load(open(path))
'''


def test_identifiers_are_words_and_parts_of_words() -> None:
    assert tokens("parseHTTPTimeout_ms(x)") == [
        "parse",
        "http",
        "timeout",
        "ms",
        "parsehttptimeout_ms",
    ]
    assert tokens("MAX_BYTES = 4096") == ["max", "bytes", "max_bytes", "4096"]
    assert tokens("  \u00e9\u20ac ++") == []


def test_chunks_start_at_definitions_and_lose_no_line() -> None:
    text = CONFIG + "\n" + "".join(f"x{i} = {i}\n" for i in range(100))
    chunks = list(cut("a.py", text))
    heads = [chunk.text.split("\n")[0].strip() for chunk in chunks]
    assert heads[:4] == [
        '"""Settings."""',
        "class SettingsLoader:",
        "@staticmethod",
        "def load_file(self, path):",
    ]
    assert all(chunk.text.count("\n") < CHUNK_LINES for chunk in chunks)
    lines = text.split("\n")
    seen = set()
    for chunk in chunks:
        assert chunk.text.split("\n") == lines[chunk.start - 1 : chunk.end]
        seen |= set(range(chunk.start, chunk.end + 1))
    assert {n for n, line in enumerate(lines, 1) if line.strip()} <= seen
    script = "const a = 1;\nexport async function loadUser(id) {\n}\nclass B {\n}\n"
    assert [chunk.start for chunk in cut("a.ts", script)] == [1, 2, 4]


def test_a_part_of_the_code_is_found_by_what_it_does(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.text("semantic_search", query="parse the timeout", limit=1)
        assert text.startswith(
            "src/settings.py:8-11\n    @staticmethod\n    def parseTimeout(text)"
        )
        text = await bench.text("semantic_search", query="load file", glob="docs/*")
        assert text.startswith("docs/use.md:1-1")
        assert "Nothing in the repository" in await bench.text("semantic_search", query="zebra")
        assert "Nothing in the repository" in await bench.text("semantic_search", query="??")
        ignored = await bench.text("semantic_search", query="secretword")
        assert "Nothing" in ignored

    files: dict[str, str | bytes] = {
        "src/settings.py": CONFIG,
        "src/other.py": "def other():\n    return 1\n",
        "docs/use.md": "How to load a file.\n",
        "big.txt": "secretword\n" * 40_000,
        "data.bin": b"secretword\0",
        ".gitignore": "build/\n",
        "build/x.py": "secretword = 1\n",
        ".git/HEAD": "secretword\n",
        "empty.py": "",
        "name\nwith newline.py": "x = 1\n",
        "-dash.py": "x = 1\n",
    }
    run(tmp_path, body, files)


def test_the_index_follows_edits_removals_and_restores(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        async def found(query: str) -> list[str]:
            text = await bench.text("semantic_search", query=query)
            return [] if text.startswith("Nothing") else [part.split(":")[0] for part in [text]]

        assert await found("apple") == ["a.py"]
        before = await bench.sandbox.snapshot()
        await bench.text("edit", path="a.py", old_text="apple", new_text="grape")
        assert await found("apple") == []
        assert await found("grape") == ["a.py"]
        # The same size, with the modification time set back.
        same = "touch -r a.py /tmp/stamp; sed -i s/grape/melon/ a.py; touch -r /tmp/stamp a.py"
        await bench.text("terminal", command=same)
        assert await found("grape") == []
        assert await found("melon") == ["a.py"]
        await bench.text("terminal", command="mv a.py c.py; rm b.py; ln c.py d.py; ln -s c.py e.py")
        assert await found("banana") == []
        text = await bench.text("semantic_search", query="melon")
        assert [line for line in text.split("\n") if ":1-" in line] == ["c.py:1-2", "d.py:1-2"]
        await bench.sandbox.restore(before)
        assert await found("melon") == []
        assert await found("apple") == ["a.py"]
        assert await found("banana") == ["b.py"]
        await bench.text("terminal", command="rm *.py")
        assert await found("apple") == []

    files = {"a.py": "def fruit():\n    return 'apple'\n", "b.py": "banana = 1\n"}
    run(tmp_path, body, files)


def test_files_beyond_one_read_are_all_indexed(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        for number in (0, 29, 59):
            text = await bench.text("semantic_search", query=f"marker{number}")
            assert text.startswith(f"f{number:02}.txt:1-")

    files = {f"f{i:02}.txt": f"marker{i} x\n" + "filler line\n" * 8000 for i in range(60)}
    run(tmp_path, body, files)


class TrigramEmbedder:
    """Vectors that count hashed trigrams: near for words that look alike."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def embed(self, texts: Sequence[str]) -> Any:
        self.texts += texts
        vectors = np.zeros((len(texts), 256), dtype=np.float32)
        for row, text in enumerate(texts):
            for at in range(len(text) - 2):
                vectors[row, zlib.crc32(text[at : at + 3].lower().encode()) % 256] += 1
        return vectors


def test_an_embedder_finds_what_shares_no_word_and_embeds_each_text_once(tmp_path: Path) -> None:
    files = {"a.py": "def authentication():\n    pass\n", "b.py": "def zip_code():\n    pass\n"}

    async def main() -> None:
        embedder = TrigramEmbedder()
        async with open_bench(tmp_path, files, embedder=embedder) as bench:
            text = await bench.text("semantic_search", query="authenticate", limit=1)
            assert text.startswith("a.py:1-2")
            await bench.text("write", path="c.py", content="new = 1\n")
            text = await bench.text("semantic_search", query="zip", limit=1)
            assert text.startswith("b.py:1-2")
            queries = ["authenticate", "zip"]
            chunks = sorted(text for text in embedder.texts if text not in queries)
            assert chunks == sorted([*(body.rstrip() for body in files.values()), "new = 1"])

    asyncio.run(main())


def test_fusion_prefers_what_both_rankings_have() -> None:
    assert fuse([[1, 2, 3], [3, 4, 2]])[:2] == [3, 2]
    assert fuse([[5, 1]]) == [5, 1]
    assert fuse([[], []]) == []
