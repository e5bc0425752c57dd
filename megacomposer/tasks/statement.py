"""The task in words: what the missing feature is, as its users know it. No implementation."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Function, Kind, Symbol
from megacomposer.tasks.repository import Repository

_OPENING = {
    "function": "A function is missing from this project.",
    "class": "A class, with what belongs to it, is missing from this project.",
    "module": "A module is missing from this project.",
    "multi": "A feature that spans several files is missing from this project.",
}


def write_statement(
    repository: Repository,
    graph: CallGraph,
    kind: str,
    symbols: frozenset[str],
    modules: frozenset[str],
    words_of_tests: frozenset[str],
) -> str:
    """Instructions for an agent. Names the public parts, their signatures and documentation.

    Private parts are named only where tests use them. Raises ValueError where nothing says what
    the feature does.
    """
    chosen = [graph.symbols[id] for id in sorted(symbols, key=_order(graph))]
    shown = [symbol for symbol in chosen if symbol.public or symbol.name in words_of_tests]
    if not any(_documented(graph, symbol) for symbol in shown):
        raise ValueError("no documentation says what the deleted code does")
    lines = [
        f"# {repository.name}: implement {_title(shown)}",
        "",
        _OPENING[kind],
        f"Implement it in the repository in the current directory ({repository.name} "
        f"{repository.version}), so that it works as described here, and leave all else working.",
        "",
    ]
    for module in sorted(modules):
        lines += [f"The whole file `{repository.modules[module]}` is to be written anew.", ""]
    for symbol in shown:
        lines += [*_describe(graph, symbol), ""]
    places = ", ".join(f"`{path}`" for path in repository.test_paths)
    lines += [
        "## How it is judged",
        "",
        f"The project's own tests ({places}) are run with pytest on your changed sources. Your "
        "changes to tests and to their configuration are not used. Code elsewhere in the project "
        "and in the tests that uses the missing names shows how they are called.",
        "",
    ]
    return "\n".join(lines)


def _order(graph: CallGraph):  # type: ignore[no-untyped-def]
    return lambda id: (graph.symbols[id].path, graph.symbols[id].first_line)


def _title(shown: list[Symbol]) -> str:
    names = list(dict.fromkeys(f"`{symbol.qualname}`" for symbol in shown))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _documented(graph: CallGraph, symbol: Symbol) -> bool:
    parts = [symbol, *(graph.methods(symbol.id) if symbol.kind is Kind.CLASS else [])]
    return any(len(part.docstring) >= 20 for part in parts)


def _describe(graph: CallGraph, symbol: Symbol) -> Iterator[str]:
    exports = graph.exports(symbol.id)
    yield f"## `{symbol.module}.{symbol.qualname}`"
    yield ""
    also = (
        f" Also reachable as {', '.join(f'`{path}`' for path in exports[1:])}."
        if exports[1:]
        else ""
    )
    yield f"In `{symbol.path}`.{also}"
    if symbol.qualname.partition(".")[0] in graph.modules[symbol.module].all_names:
        yield f"Listed in `{symbol.module}.__all__`."
    yield ""
    node = symbol.node
    if isinstance(node, ast.ClassDef):
        yield from _describe_class(node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _code([*_decoration(node), _signature(node)])
        yield from _documentation(node)
    else:
        annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
        yield from _code([f"{symbol.name}{annotation}"])
        sources = sorted(graph.symbols.keys() & graph.uses[symbol.id])
        if sources:
            made_of = ", ".join(f"`{id.replace(':', '.')}`" for id in sources)
            yield f"A variable of the module, made from {made_of}."


def _describe_class(node: ast.ClassDef) -> Iterator[str]:
    bases = [ast.unparse(base) for base in node.bases]
    yield from _code([f"class {node.name}" + (f"({', '.join(bases)})" if bases else "")])
    yield from _documentation(node)
    protocols: list[str] = []
    for inner in node.body:
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        special = inner.name.startswith("__") and inner.name.endswith("__")
        if special and inner.name not in ("__init__", "__new__", "__call__"):
            protocols.append(f"`{inner.name}`")
        elif special or not inner.name.startswith("_"):
            yield ""
            yield from _code([*_decoration(inner), _signature(inner)])
            yield from _documentation(inner)
    if protocols:
        yield ""
        yield f"Its special methods: {', '.join(dict.fromkeys(protocols))}."


def _code(lines: list[str]) -> list[str]:
    return ["```python", *lines, "```"]


def _decoration(node: Function) -> list[str]:
    """Decorators such as `@property` are part of how a thing is called."""
    return [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]


def _signature(node: Function) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _documentation(node: Function | ast.ClassDef) -> list[str]:
    text = ast.get_docstring(node)
    if not text:
        return []
    return ["", *inspect.cleandoc(text).splitlines()]
