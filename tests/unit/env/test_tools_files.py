"""The tools that read, change, list and search files."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megacomposer.env.tools.files import MAX_FILE_BYTES
from tool_cases import Bench, run, write_files

SOURCE = "def f(a):\n    return a\n\n\ndef g(a):\n    return a\n"


def test_read_shows_lines_by_number_and_says_what_it_left_out(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.text("read", path="a.py", offset=2, limit=2) == (
            "     2\t    return a\n     3\t\n[lines 2-3 of 6; continue with offset 4]"
        )
        assert (await bench.text("read", path="/workspace/a.py")).startswith("     1\tdef f(a):\n")
        assert await bench.text("read", path="no newline") == (
            "     1\tx\n[no newline at the end of the file]"
        )
        assert await bench.text("read", path="empty") == "[empty is empty]"
        assert "has 6 lines" in await bench.error("bad_arguments", "read", path="a.py", offset=7)
        shown = await bench.text("read", path="long")
        assert shown.split("\n")[0] == "     1\t" + "x" * 2000 + "[... 1000 more characters]"
        assert "lines end with \\r\\n" in await bench.text("read", path="crlf")
        assert "not UTF-8 from byte 1 on" in await bench.text("read", path="latin")

    files: dict[str, str | bytes] = {
        "a.py": SOURCE,
        "no newline": "x",
        "empty": "",
        "long": "x" * 3000 + "\n",
        "crlf": "a\r\nb\r\n",
        "latin": b"a\xe9b\n",
    }
    run(tmp_path, body, files)


def test_read_pages_through_a_file_without_losing_a_line(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * (number % 90) for number in range(1, 3001)]

    async def body(bench: Bench) -> None:
        seen, offset = [], 1
        while offset <= len(lines):
            text = await bench.text("read", path="big", offset=offset, limit=5000)
            rows = [row.partition("\t") for row in text.split("\n") if "\t" in row]
            assert [int(row[0]) for row in rows] == list(range(offset, offset + len(rows)))
            seen += [row[2] for row in rows]
            offset += len(rows)
        assert seen == lines

    run(tmp_path, body, {"big": "\n".join(lines) + "\n"})


def test_read_refuses_what_is_no_text_with_the_reason(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert "PNG image of 12 bytes" in await bench.error("refused", "read", path="a.png")
        assert "binary file of 3 bytes" in await bench.error("refused", "read", path="b.bin")
        assert "longer than 8 MiB" in await bench.error("limit", "read", path="huge")
        assert "use list" in await bench.error("bad_arguments", "read", path="sub")
        await bench.sandbox.exec(["mkfifo", "pipe"])
        await bench.error("refused", "read", path="pipe")
        await bench.error("refused", "read", path="/dev/zero")

    files: dict[str, str | bytes] = {
        "a.png": b"\x89PNG\r\n\x1a\n1234",
        "b.bin": b"a\0b",
        "huge": b"x" * (MAX_FILE_BYTES + 1),
        "sub/x": "",
    }
    run(tmp_path, body, files)


def test_a_missing_file_is_answered_with_the_one_of_that_name(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert "did you mean src/pkg/[a].py?" in await bench.error(
            "not_found", "read", path="[a].py"
        )
        assert "did you mean src/b.py?" in await bench.error("not_found", "list", path="lib/b.py")
        text = await bench.error("not_found", "read", path="nowhere.py")
        assert "relative to /workspace" in text
        await bench.error("not_found", "edit", path="src/b.py/x", old_text="a", new_text="b")

    run(tmp_path, body, {"src/pkg/[a].py": "", "src/b.py": ""})


def test_files_of_the_host_cannot_be_named(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("canary")

    async def body(bench: Bench) -> None:
        await bench.sandbox.exec(["ln", "-s", str(canary), "link"])
        await bench.sandbox.exec(["ln", "-s", str(tmp_path), "dir"])
        await bench.sandbox.exec(["ln", "-s", "loop", "loop"])
        for path in (str(canary), f"../../../..{canary}", "link", "dir/canary"):
            await bench.error("not_found", "read", path=path)
            await bench.error("not_found", "grep", pattern="canary", path=path)
        await bench.error("refused", "read", path="loop")
        await bench.error("not_found", "list", path="dir")
        for path in (str(canary), "dir/canary"):
            await bench("write", path=path, content="broken")
        await bench("apply_patch", diff="--- /dev/null\n+++ b/../up\n@@ -0,0 +1 @@\n+x\n")
        assert not (await bench.sandbox.exec(["test", "-e", "/up"])).ok
        assert canary.read_text() == "canary"

    run(tmp_path, body)


def test_write_makes_directories_and_keeps_the_bytes(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.text("write", path="new/deep/a.txt", content="\u20ac\r\n\tx")
        assert text == "Wrote new/deep/a.txt: bytes 7, lines 2."
        assert await bench.sandbox.read_file("new/deep/a.txt") == b"\xe2\x82\xac\r\n\tx"
        assert "use list" in await bench.error("bad_arguments", "write", path="new", content="x")

    run(tmp_path, body)


def test_edit_replaces_one_exact_occurrence_or_all_on_request(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        read = bench.sandbox.read_file
        text = await bench.error(
            "bad_arguments", "edit", path="a.py", old_text="return a", new_text="return b"
        )
        assert "2 times (lines 2, 6)" in text
        assert await read("a.py") == SOURCE.encode()
        shown = await bench.text(
            "edit", path="a.py", old_text="def g(a):\n    return a", new_text="def g(a):\n    pass"
        )
        assert "     6\t    pass" in shown
        shown = await bench.text(
            "edit", path="a.py", old_text="(a)", new_text="(b)", replace_all=True
        )
        assert shown.startswith("Replaced 2 occurrences; the first in a.py:")
        assert await read("a.py") == b"def f(b):\n    return a\n\n\ndef g(b):\n    pass\n"
        await bench.text("edit", path="latin", old_text="b", new_text="\u00e9")
        assert await read("latin") == b"a\xe9\xc3\xa9\n"
        await bench.error("refused", "edit", path="b.bin", old_text="a", new_text="b")
        same = await bench.error("bad_arguments", "edit", path="a.py", old_text="a", new_text="a")
        assert "the same text" in same

    run(tmp_path, body, {"a.py": SOURCE, "latin": b"a\xe9b\n", "b.bin": b"a\0"})


def test_an_edit_that_matches_nothing_is_answered_with_the_nearest_text(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        async def miss(path: str, old: str) -> str:
            return await bench.error("not_found", "edit", path=path, old_text=old, new_text="x")

        assert "Only white space differs at line 1; the file has:\ndef f(a):\n    return a" in (
            await miss("a.py", "def f(a):\n\treturn a")
        )
        assert "The nearest line is 5:\ndef g(a):" in await miss("a.py", "def g(a, b):")
        assert "The nearest line is 1:\ndef long_name(" in await miss("b.py", "def long_nam(self")
        assert "with \\r\\n at the ends" in await miss("crlf", "a\nb")
        assert "Nothing in the file is near it" in await miss("a.py", "import numpy")
        assert "not there" in await miss("a.py", "\n\n\n\n\n\n\n\n\n")
        assert await bench.sandbox.read_file("a.py") == SOURCE.encode()

    run(
        tmp_path,
        body,
        {"a.py": SOURCE, "crlf": "a\r\nb\r\n", "b.py": f"def long_name({'a, ' * 40}):"},
    )


def test_a_patch_is_applied_whole_or_not_at_all(tmp_path: Path) -> None:
    tree = write_files(tmp_path / "git", {"a.py": SOURCE, "old": "x\n"})
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    (tree / "a.py").write_text(SOURCE.replace("def f", "def h"))
    (tree / "new").write_text("y\n")
    (tree / "old").unlink()
    subprocess.run([*git, "add", "-A"], cwd=tree, check=True)
    diff = subprocess.run(
        [*git, "diff", "--cached"], cwd=tree, check=True, capture_output=True, text=True
    ).stdout

    async def body(bench: Bench) -> None:
        broken = diff + diff.replace("a.py", "missing.py")
        text = await bench.error("failed", "apply_patch", diff=broken)
        assert "nothing was changed. git says" in text
        assert (await bench.sandbox.exec(["ls"])).stdout == b"a.py\nold\n"
        text = await bench.text("apply_patch", diff=diff.rstrip("\n"))
        assert text == "Applied: changed a.py, new; removed old."
        assert (await bench.sandbox.exec(["ls"])).stdout == b"a.py\nnew\n"
        assert b"def h" in await bench.sandbox.read_file("a.py")
        await bench.error("failed", "apply_patch", diff="no diff")

    run(tmp_path, body, {"a.py": SOURCE, "old": "x\n"})


TREE: dict[str, str | bytes] = {
    "src/a.py": "import os\nNAME = 1\nname = 2\n",
    "src/deep/b.py": "x = 'a.c'\ny = 'abc'\n",
    "src/deep/c.js": "NAME\n",
    "-dash": "NAME\n",
    ".hidden/d.py": "hidden = 1\n",
    ".gitignore": "build/\n",
    "build/e.py": "NAME = 3\n",
}


def test_list_shows_directories_files_and_links_to_a_depth(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.sandbox.exec(["sh", "-c", "git init -q; ln -s src/a.py link; mkdir none"])
        text = await bench.text("list")
        assert text.split("\n") == [
            "-dash  5",
            ".git/",
            ".gitignore  7",
            ".hidden/",
            "build/",
            "link -> src/a.py",
            "none/",
            "src/",
        ]
        deep = await bench.text("list", path="src", depth=2)
        assert deep == "a.py  28\ndeep/\ndeep/b.py  20\ndeep/c.js  5"
        assert await bench.text("list", path="none") == "[none is empty]"
        assert "3 of 8 entries" in await bench.text("list", limit=3)
        assert "use read" in await bench.error("bad_arguments", "list", path="-dash")

    run(tmp_path, body, TREE)


def test_glob_sorts_and_leaves_out_what_git_ignores_unless_asked(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.sandbox.exec(["git", "init", "-q"])
        assert await bench.text("glob", pattern="*.py") == (".hidden/d.py\nsrc/a.py\nsrc/deep/b.py")
        assert "build/e.py" in await bench.text("glob", pattern="*.py", ignored=True)
        assert await bench.text("glob", pattern="src/**/*.{js,py}", path=".") == (
            "src/a.py\nsrc/deep/b.py\nsrc/deep/c.js"
        )
        assert await bench.text("glob", pattern="*.rs") == "No file matches *.rs."
        assert ".git/" not in await bench.text("glob", pattern="**", ignored=True)
        assert "1 of 3 files" in await bench.text("glob", pattern="*.py", limit=1)
        assert "unclosed" in await bench.error("bad_arguments", "glob", pattern="[a")
        await bench.error("not_found", "glob", pattern="*", path="nowhere")

    run(tmp_path, body, TREE)


def test_grep_finds_by_expression_type_and_place(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.sandbox.exec(["git", "init", "-q"])
        assert await bench.text("grep", pattern="NAME") == (
            "-dash:1:NAME\nsrc/a.py:2:NAME = 1\nsrc/deep/c.js:1:NAME"
        )
        assert await bench.text("grep", pattern="a.c", path="src") == (
            "src/deep/b.py:1:x = 'a.c'\nsrc/deep/b.py:2:y = 'abc'"
        )
        literal = await bench.text("grep", pattern="a.c", literal=True)
        assert literal == "src/deep/b.py:1:x = 'a.c'"
        assert await bench.text(
            "grep", pattern="name", ignore_case=True, file_type="py", output="counts"
        ) == ("src/a.py:2")
        assert await bench.text("grep", pattern="NAME", glob="*.js", output="files") == (
            "src/deep/c.js"
        )
        assert await bench.text("grep", pattern="NAME", path="-dash") == "-dash:1:NAME"
        assert await bench.text("grep", pattern="--pre=touch x") == "No match."
        context = await bench.text("grep", pattern="NAME", path="src/a.py", context=1)
        assert context == "src/a.py-1-import os\nsrc/a.py:2:NAME = 1\nsrc/a.py-3-name = 2"
        many = await bench.text("grep", pattern=r"os\nNAME", multiline=True, path="src")
        assert many == "src/a.py:1:import os\nsrc/a.py:2:NAME = 1"
        assert "2 of 3 lines" in await bench.text("grep", pattern="NAME", limit=2)
        assert "unclosed group" in await bench.error("bad_arguments", "grep", pattern="(")
        assert "unrecognized file type: nolang" in await bench.error(
            "bad_arguments", "grep", pattern="a", file_type="nolang"
        )
        await bench.error("not_found", "grep", pattern="a", path="nowhere")

    run(tmp_path, body, TREE)


def test_a_configuration_of_ripgrep_that_the_agent_left_is_not_used(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.text("grep", pattern="NAME") == "a:1:NAME"
        assert not (await bench.sandbox.exec(["test", "-e", "ran"])).ok

    files = {"a": "NAME\n", "rc": "--pre=/workspace/pre\n--invert-match\n"}
    run(tmp_path, body, files, env={"RIPGREP_CONFIG_PATH": "/workspace/rc"}, names=("grep",))
