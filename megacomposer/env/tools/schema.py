"""What a tool is: its name, its arguments as a type, its JSON Schema, and how a call is checked.

A tool's arguments are a msgspec Struct, so that one declaration gives the schema that the model
reads and the check that its call meets.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

import msgspec

MAX_ARGUMENT_BYTES = 4 << 20
"""Of one call's arguments as JSON."""


class ToolError(Exception):
    """A call that gets an error as its answer; the text says what is right, `kind` is one of
    Observation's error kinds."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every tool's arguments: other properties, and other types, are errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool."""

    name: str
    description: str
    """What the model reads."""
    arguments: type[Arguments]
    run: Callable[[Any], Awaitable[str]]
    """Gets an instance of `arguments` and returns the text of the answer. Raises ToolError."""
    reads_only: bool = False
    """It changes nothing, so it may run beside others that do not."""
    programs: tuple[str, ...] = ()
    """What it starts inside the sandbox; looked for when the tool set starts."""

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's chat API, chat templates and (by `parameters`) MCP take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters_schema(self.arguments),
            },
        }


def parameters_schema(arguments: type[Arguments]) -> dict[str, Any]:
    """JSON Schema of the arguments, without references and titles."""
    (top,), components = msgspec.json.schema_components([arguments], ref_template="{name}")

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(components[node["$ref"]])
        plain = {key: inline(value) for key, value in node.items()}
        if plain.get("type") == "object":
            plain.pop("title", None)
            plain.pop("description", None)  # the class's docstring is for programmers
        return plain

    schema: dict[str, Any] = inline(top)
    return schema


def decode_arguments(tool: Tool, arguments: Mapping[str, Any] | str) -> Arguments:
    """The checked arguments of a call. Raises ToolError: bad_json or bad_arguments."""
    if isinstance(arguments, str):
        parsed = _strict_json(tool, arguments)
    else:
        parsed = dict(arguments)
        _refuse_lone_surrogates(tool, parsed)
    try:
        return msgspec.convert(parsed, tool.arguments)
    except msgspec.ValidationError as error:
        raise ToolError("bad_arguments", _explain(tool, str(error))) from error


def signature(tool: Tool) -> str:
    """`{path: string, limit?: integer 1..2000}`: the schema in one line."""
    return _shape(parameters_schema(tool.arguments))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` was meant to be, or ""."""
    known = list(known)
    words: list[str] = re.findall(r"[a-z_]+", name.lower())
    for word in words:
        if word in known:
            return word
    close = difflib.get_close_matches(name.strip().lower()[:100], known, n=1, cutoff=0.5)
    return close[0] if close else ""


def _shape(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " | ".join(_shape(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"[{_shape(schema['items'])}, ...]"
    if schema.get("type") != "object":
        bounds = [str(schema[key]) for key in ("minimum", "maximum") if key in schema]
        return f"{schema.get('type', 'any')} {'..'.join(bounds)}".rstrip()
    required = schema.get("required", [])
    fields = [
        f"{name}{'' if name in required else '?'}: {_shape(value)}"
        for name, value in schema.get("properties", {}).items()
    ]
    return "{" + ", ".join(fields) + "}"


def _explain(tool: Tool, message: str) -> str:
    """msgspec's message, the property that was probably meant, and what is right."""
    message = message.replace(" - at `$.", " at `").replace(" - at `$", " at `")
    unknown = re.search(r"unknown field `(.+?)`", message)
    names = [field.encode_name for field in msgspec.structs.fields(tool.arguments)]
    meant = nearest(unknown.group(1), names) if unknown else ""
    hint = f" (did you mean `{meant}`?)" if meant else ""
    return f"{tool.name}: {message}{hint}; expected {signature(tool)}."


def _strict_json(tool: Tool, text: str) -> Any:
    if len(text) > MAX_ARGUMENT_BYTES:
        limit = f"at most {MAX_ARGUMENT_BYTES >> 20} MiB"
        raise ToolError("limit", f"{tool.name}: the arguments are too long; send {limit}.")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise ValueError(f"the property {key!r} is there twice")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        parsed = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        reason = f"{error.msg} at {place}"
        if error.msg == "Extra data":
            reason = f"text after the end of the object at {place}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error).partition(";")[0]
    else:
        if isinstance(parsed, dict):
            _refuse_lone_surrogates(tool, parsed)
            return parsed
        reason = f"it is a JSON {_json_type(parsed)}"
    expected = f"expected exactly one JSON object, {signature(tool)}"
    raise ToolError("bad_json", f"{tool.name}: the arguments cannot be read: {reason}; {expected}.")


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {
        list: "array",
        str: "string",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names[type(value)]


def _refuse_lone_surrogates(tool: Tool, value: Any) -> None:
    """Half of a UTF-16 pair has no UTF-8, so it can be neither written nor passed on."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(node)
            stack.extend(node.values())
        elif isinstance(node, list | tuple):
            stack.extend(node)
        elif isinstance(node, str):
            try:
                node.encode()
            except UnicodeEncodeError as error:
                text = f"{tool.name}: a string holds half of a surrogate pair ({error.reason})"
                raise ToolError("bad_json", f"{text}; write the whole character.") from error
