"""Calls: what is malformed, in which order things happen, and what is never swallowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import SandboxClosedError, SandboxError, SandboxSpec
from megacomposer.env.task import TestPlan
from megacomposer.env.tools.schema import ToolError, decode_arguments
from megacomposer.env.tools.toolset import TOOL_NAMES, ToolSet
from megacomposer.env.transcript import ToolCall
from tool_cases import Bench, call, open_bench, run

MALFORMED = [
    ("reed", {"path": "a"}, "unknown_tool", "did you mean read?"),
    ("functions.read", {"path": "a"}, "unknown_tool", "did you mean read?"),
    ("read\n", {"path": "a"}, "unknown_tool", "did you mean read?"),
    ("<tool>read</tool>", {"path": "a"}, "unknown_tool", "did you mean read?"),
    ("", {}, "unknown_tool", "The tools are read, write,"),
    ("x" * 100_000, {}, "unknown_tool", "The tools are read, write,"),
    ("read", "", "bad_json", "expected exactly one JSON object"),
    ("read", "path=a", "bad_json", "line 1 column 1"),
    ("read", '{"path": "a"} {"path": "b"}', "bad_json", "text after the end of the object"),
    ("read", '{"path": "a"}</tool_call>', "bad_json", "text after the end of the object"),
    ("read", '```json\n{"path": "a"}\n```', "bad_json", "expected exactly one JSON object"),
    ("read", '{"path": "a", "path": "b"}', "bad_json", "'path' is there twice"),
    ("read", "{'path': 'a'}", "bad_json", "double quotes"),
    ("read", '{"path": "a",}', "bad_json", "expected exactly one JSON object"),
    ("read", '{"path": "a", "limit": NaN}', "bad_json", "NaN is not JSON"),
    ("read", '{"path": "a", "limit": Infinity}', "bad_json", "Infinity is not JSON"),
    ("read", '["a"]', "bad_json", "a JSON array"),
    ("read", "null", "bad_json", "a JSON null"),
    ("read", '{"path": "\\ud800"}', "bad_json", "half of a surrogate pair"),
    ("read", "[" * 200_000, "bad_json", "nested too deeply"),
    ("read", '{"path":"a","limit":' + "9" * 5000 + "}", "bad_json", "4300 digits"),
    ("read", '{"path":"a","limit":' + "9" * 100 + "}", "bad_arguments", "<= 5000"),
    ("read", '{"path": "' + "a" * (5 << 20) + '"}', "limit", "at most 4 MiB"),
    ("read", {}, "bad_arguments", "missing required field `path`"),
    ("read", {"path": "a", "limits": 3}, "bad_arguments", "did you mean `limit`?"),
    ("read", {"path": "a", "limit": "3"}, "bad_arguments", "Expected `int`, got `str`"),
    ("read", {"path": "a", "limit": True}, "bad_arguments", "got `bool`"),
    ("read", {"path": "a", "limit": 3.5}, "bad_arguments", "got `float`"),
    ("read", {"path": "a", "limit": 0}, "bad_arguments", ">= 1"),
    ("read", {"path": None}, "bad_arguments", "got `null`"),
    ("read", {"path": ["a"]}, "bad_arguments", "got `array`"),
    ("read", {"path": ""}, "bad_arguments", "length >= 1"),
    ("read", {"path": "a\0b"}, "bad_arguments", "NUL"),
    ("write", {"path": "a\0b", "content": ""}, "bad_arguments", "NUL"),
    ("list", {"path": "a\0b"}, "bad_arguments", "NUL"),
    ("grep", {"pattern": "a\0b"}, "bad_arguments", "NUL"),
    ("terminal", {"command": "echo \0"}, "bad_arguments", "NUL"),
    ("terminal", {"command": "ls", "shell": "../x"}, "bad_arguments", "shell"),
    ("terminal", '{"command": "ls", "timeout_s": 1e999}', "bad_arguments", "<= 600"),
    ("grep", {"pattern": "a", "output": "all"}, "bad_arguments", '"counts" | "files" | "lines"'),
    ("todo", {"update": [{"id": 1, "state": "done"}]}, "bad_arguments", "update[0]"),
    ("finish", {"message": "x", "success": True}, "bad_arguments", "unknown field `success`"),
]


def test_a_malformed_call_is_answered_with_what_is_right_and_never_raised(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        for name, arguments, kind, part in MALFORMED:
            answer = await bench.tools.call(ToolCall(id="7", name=name, arguments=arguments))
            shown = (name[:40], str(arguments)[:60], answer)
            assert (answer.is_error, answer.error_kind, answer.call_id) == (True, kind, "7"), shown
            assert part in answer.text, shown
            assert len(answer.text) < 2500, shown
        assert not bench.tools.finished

    run(tmp_path, body)


def nodes(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [node for item in schema for node in nodes(item)]
    if not isinstance(schema, dict):
        return []
    return [schema, *(node for item in schema.values() for node in nodes(item))]


def test_the_schema_that_the_model_reads_and_the_check_of_its_calls_agree(tmp_path: Path) -> None:
    samples: list[tuple[str, dict[str, Any]]] = [
        ("read", {"path": "a"}),
        ("read", {"path": "a", "offset": 2, "limit": 5000}),
        ("read", {"path": "a", "limit": 5001}),
        ("read", {"path": ""}),
        ("edit", {"path": "a", "old_text": "", "new_text": ""}),
        ("edit", {"path": "a", "old_text": "x", "new_text": "", "replace_all": 1}),
        ("grep", {"pattern": "x", "file_type": "py"}),
        ("grep", {"pattern": "x", "file_type": "--pre=sh"}),
        ("grep", {"pattern": "x", "output": "files", "context": 20}),
        ("grep", {"pattern": "x", "context": 21}),
        ("terminal", {"command": "ls", "timeout_s": 3}),
        ("terminal", {"command": "ls", "timeout_s": 0}),
        ("terminal", {"command": "ls", "shell": "a b"}),
        ("run_tests", {"tests": ["a::b"], "timeout_s": None}),
        ("run_tests", {"tests": ["--lf"]}),
        ("run_tests", {"tests": "a::b"}),
        ("todo", {"create": ["x"], "update": [{"id": 1, "status": "done"}]}),
        ("todo", {"update": [{"id": 0}]}),
        ("todo", {"update": [{"id": 1, "extra": 1}]}),
        ("finish", {}),
    ]

    async def body(bench: Bench) -> None:
        functions = [schema["function"] for schema in bench.tools.schemas]
        assert tuple(function["name"] for function in functions) == TOOL_NAMES
        json.dumps(functions)
        schemas = {function["name"]: function["parameters"] for function in functions}
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
            for node in nodes(schema):
                assert "$ref" not in node
                assert node.get("type") != "object" or node["additionalProperties"] is False
        for name, arguments in samples:
            valid = jsonschema.Draft202012Validator(schemas[name]).is_valid(arguments)
            try:
                decode_arguments(bench.tools.tools[name], arguments)
            except ToolError:
                assert not valid, (name, arguments)
            else:
                assert valid, (name, arguments)

    run(tmp_path, body, tests=TestPlan())


def test_a_tool_that_the_task_does_not_give_is_unknown(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert [schema["function"]["name"] for schema in bench.tools.schemas] == ["read", "finish"]
        text = await bench.error("unknown_tool", "terminal", command="touch /tmp/x")
        assert text.endswith("The tools are read, finish.")
        assert not (await bench.sandbox.exec(["test", "-e", "/tmp/x"])).ok

    run(tmp_path, body, names=("finish", "read"))


def test_a_wrong_tool_set_is_refused_before_the_rollout(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_bench(tmp_path) as bench:
            with pytest.raises(ValueError, match="there is no 'bash'; known: read, write"):
                ToolSet(bench.sandbox, ["bash"])
            with pytest.raises(ValueError, match="run_tests needs the task's TestPlan"):
                ToolSet(bench.sandbox, ["run_tests"])
            with pytest.raises(ValueError, match="observation_bytes"):
                ToolSet(bench.sandbox, observation_bytes=10)

    asyncio.run(main())


def test_an_image_without_ripgrep_fails_at_the_start_and_names_it(tmp_path: Path) -> None:
    async def main() -> None:
        backend = await open_backend("bubblewrap", store=tmp_path)
        try:
            async with await backend.start(SandboxSpec(env={"PATH": "/nowhere"})) as sandbox:
                with pytest.raises(SandboxError, match="no rg, which the tool grep needs"):
                    await ToolSet(sandbox, ["grep"]).start()
                with pytest.raises(SandboxError, match="no rg"):
                    await ToolSet(sandbox, ["grep"]).call(call("grep", pattern="x"))
                await ToolSet(sandbox, ["read", "todo"]).start()
        finally:
            await backend.close()

    asyncio.run(main())


def test_a_failure_of_the_infrastructure_is_raised_and_is_no_observation(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.tools.start()
        await bench.sandbox.close()
        for name, arguments in (("read", {"path": "a"}), ("terminal", {"command": "ls"})):
            with pytest.raises(SandboxClosedError):
                await bench(name, **arguments)
        with pytest.raises(SandboxClosedError):
            await bench.tools.call_all([call("todo"), call("list"), call("todo")])

    run(tmp_path, body)


def test_calls_of_one_turn_take_effect_and_answer_in_their_order(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        calls = [
            call("write", path="a", content="one\n"),
            call("read", path="a"),
            call("grep", pattern="o", path="a"),
            call("edit", path="a", old_text="one", new_text="two"),
            call("read", path="a"),
            call("terminal", command="echo three > a"),
            call("nothing"),
            call("read", path="a"),
            call("finish", message="done"),
            call("read", path="a"),
        ]
        answers = await bench.tools.call_all(calls)
        assert [answer.call_id for answer in answers] == [c.id for c in calls]
        texts = [answer.text for answer in answers]
        assert [texts[i].strip() for i in (1, 4, 7)] == ["1\tone", "1\ttwo", "1\tthree"]
        assert texts[2] == "a:1:one"
        kinds = [answer.error_kind for answer in answers]
        assert kinds == ["", "", "", "", "", "", "unknown_tool", "", "", "refused"]
        assert (bench.tools.finished, bench.tools.finish_message) == (True, "done")

    run(tmp_path, body)


class GatedEmbedder:
    """Embeds by word hashes, once the gate is open: a reader of known duration."""

    def __init__(self) -> None:
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    async def embed(self, texts: Sequence[str]) -> Any:
        self.entered.set()
        await self.gate.wait()
        return np.ones((len(texts), 2), dtype=np.float32)


def test_readers_run_together_and_a_writer_waits_for_them(tmp_path: Path) -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        async with open_bench(tmp_path, {"a": "word\n"}, embedder=embedder) as bench:
            search = asyncio.create_task(bench("semantic_search", query="word"))
            await embedder.entered.wait()
            assert "word" in await bench.text("read", path="a")  # beside the search
            write = asyncio.create_task(bench("write", path="a", content="new\n"))
            later = asyncio.create_task(bench("read", path="a"))
            await asyncio.sleep(0.05)
            assert not search.done()
            assert not write.done()
            assert not later.done()
            embedder.gate.set()
            assert not (await search).is_error
            assert "new" in (await later).text
            assert write.done()

    asyncio.run(main())


def test_a_cancelled_writer_does_not_let_the_next_one_overtake_the_readers(tmp_path: Path) -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        async with open_bench(tmp_path, {"a": "word\n"}, embedder=embedder) as bench:
            search = asyncio.create_task(bench("semantic_search", query="word"))
            await embedder.entered.wait()
            first = asyncio.create_task(bench("write", path="a", content="first\n"))
            second = asyncio.create_task(bench("write", path="b", content="second\n"))
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.sleep(0.05)
            assert first.cancelled()
            assert not second.done()
            embedder.gate.set()
            await search
            assert not (await second).is_error
            assert "word" in await bench.text("read", path="a")

    asyncio.run(main())


def test_no_answer_is_longer_than_the_limit(tmp_path: Path) -> None:
    long_line, many = "\u20ac" * 50_000, "".join(f"line {i} \u20ac\n" for i in range(5000))

    async def body(bench: Bench) -> None:
        calls = [
            call("read", path="many"),
            call("read", path="long"),
            call("grep", pattern="line", limit=2000),
            call("grep", pattern=".", path="long"),
            call("list", path="d", limit=2000),
            call("glob", pattern="*", limit=2000),
            call("terminal", command="cat many"),
            call("terminal", command="cat many; sleep 60", timeout_s=0.5),
            call("edit", path="many", old_text="line 4999", new_text=long_line),
            call("edit", path="many", old_text=long_line + "x", new_text=""),
            call("semantic_search", query="line", limit=20),
            call("apply_patch", diff=long_line),
            call("todo", create=["x" * 500] * 100),
            call("x" * 100_000),
        ]
        for answer, c in zip(await bench.tools.call_all(calls), calls, strict=True):
            assert len(answer.text.encode()) <= 4000, c.name
            assert answer.text

    files = {"many": many, "long": long_line, **{f"d/{'n' * 50}{i}": "" for i in range(300)}}
    run(tmp_path, body, files, observation_bytes=4000)


def test_a_refusal_of_the_sandbox_is_in_the_audit_log(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.error("refused", "write", path="/usr/bin/x", content="")
        assert "Read-only" in text
        assert "/workspace" in text
        events = [event for event in bench.log.events if event["kind"] == "refused"]
        assert [(event["tool"], event["sandbox"]) for event in events] == [
            ("write", bench.sandbox.id)
        ]

    run(tmp_path, body)


def test_todo_items_left_open_are_known_to_the_reward_and_follow_a_fork(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.text("todo") == "The list is empty."
        await bench.text("todo", create=["one", "two", "three"])
        shown = await bench.text(
            "todo", update=[{"id": 1, "status": "done"}, {"id": 3, "status": "dropped"}]
        )
        assert shown == "1. [done] one\n2. [pending] two\n3. [dropped] three"
        assert "ids: 1 to 3" in await bench.error("not_found", "todo", update=[{"id": 4}])
        await bench.error("bad_arguments", "todo", update=[{"id": 1}], create=["lost"])
        await bench.error("limit", "todo", create=["x"] * 98)
        async with await bench.sandbox.fork() as sandbox:
            twin = bench.tools.fork(sandbox)
            await twin.call(call("todo", update=[{"id": 2, "text": "2", "status": "in_progress"}]))
            assert twin.unfinished_todos() == ("2",)
            assert bench.tools.unfinished_todos() == ("two",)
        assert await bench.text("finish") == "Finished; 1 to-do items were left open."

    run(tmp_path, body)
