"""Takes definitions out of a package's source, so that the rest still imports and runs.

A deleted function is absent: no stub stays. With it go its imports and re-exports, its strings in
`__all__`, its entries in tables at the top of a module, and calls there that register it. Stub
files (`.pyi`) lose it too.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Module, Symbol, absolute_module, is_all

Display = ast.List | ast.Tuple | ast.Set | ast.Dict
Located = ast.stmt | ast.expr | ast.alias


class NotDeletableError(ValueError):
    """These symbols cannot be taken out cleanly; `reason` is a word for the funnel."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def delete(
    graph: CallGraph, root: Path, symbols: Set[str], modules: Set[str] = frozenset()
) -> dict[str, bytes | None]:
    """The files that change: path -> new content, None for a file that goes.

    `symbols` must be closed: what refers to them is among them, or is something that `table_use`
    and `registers` accept. `modules` go as whole files. Raises NotDeletableError.
    """
    changed: dict[str, bytes | None] = {}
    for module in graph.modules.values():
        stub = Path(module.path).with_suffix(".pyi").as_posix()
        if module.name in modules:
            changed[module.path] = None
            if (root / stub).is_file():
                changed[stub] = None
            continue
        before = module.source.encode()
        after = _ModuleEdit(graph, module, module.tree, before, symbols, modules).apply()
        if after != before:
            _assert_no_dangling_name(graph, module, after, symbols, modules)
            changed[module.path] = after
        if (root / stub).is_file():
            before = (root / stub).read_bytes()
            tree = _parsed(stub, before)
            after = _ModuleEdit(graph, module, tree, before, symbols, modules).apply()
            if after != before:
                _parsed(stub, after)
                changed[stub] = after
    return changed


def table_use(graph: CallGraph, symbol: Symbol, deleted: Set[str]) -> bool:
    """Whether a variable is a list or dictionary that `deleted` are only entries of."""
    node = symbol.node
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, Display):
        return False
    entries = _entries(value)
    kept = [entry for entry in entries if not _mentions(graph, symbol.module, entry, deleted)]
    return 0 < len(kept) < len(entries)


def registers(graph: CallGraph, module: str, deleted: Set[str]) -> bool:
    """Whether each use of `deleted` by loose code at the top of `module` is a bare call that can
    go with them (`register(function)`)."""
    for node in graph.modules[module].tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or is_all(node) or _defines(node):
            continue
        if graph.references_in(module, node) & deleted and not _bare_call(node):
            return False
    return True


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    if isinstance(node, ast.Assign):
        return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _bare_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _entries(display: Display) -> list[tuple[ast.expr, ...]]:
    if isinstance(display, ast.Dict):
        return [
            (value,) if key is None else (key, value)
            for key, value in zip(display.keys, display.values, strict=True)
        ]
    return [(element,) for element in display.elts]


def _mentions(graph: CallGraph, module: str, entry: Sequence[ast.expr], deleted: Set[str]) -> bool:
    return any(graph.references_in(module, part) & deleted for part in entry)


def _parsed(path: str, source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise NotDeletableError("broken_syntax", f"{path}: {error}") from error


def _assert_no_dangling_name(
    graph: CallGraph, module: Module, after: bytes, symbols: Set[str], modules: Set[str]
) -> None:
    _parsed(module.path, after)

    def gone(name: str) -> bool:
        target = graph.resolve(module.name, name)
        return target is not None and (target in symbols or target in modules)

    def scan(scope: symtable.SymbolTable) -> None:
        for symbol in scope.get_symbols():
            at_top = symbol.is_global() or scope.get_type() == "module"
            if at_top and symbol.is_referenced() and gone(symbol.get_name()):
                raise NotDeletableError("dangling_name", f"{module.path}: {symbol.get_name()}")
        for child in scope.get_children():
            scan(child)

    scan(symtable.symtable(after.decode(), module.path, "exec"))


# Edits of one file ------------------------------------------------------------------------------


class _ModuleEdit:
    """Byte spans to remove from one file."""

    def __init__(
        self,
        graph: CallGraph,
        module: Module,
        tree: ast.Module,
        source: bytes,
        symbols: Set[str],
        modules: Set[str],
    ) -> None:
        self._graph, self._module, self._tree = graph, module, tree
        self._source, self._symbols, self._modules = source, symbols, modules
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._spans: list[tuple[int, int]] = []
        self._insert: dict[int, bytes] = {}

    def apply(self) -> bytes:
        self._body(self._tree.body, prefix="")
        for node in ast.walk(self._tree):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    self._imports(body)
        return self._cut()

    def _gone(self, id: str) -> bool:
        return id in self._symbols

    def _body(self, body: list[ast.stmt], prefix: str) -> None:
        """Definitions, and at the top also tables, `__all__` and registrations."""
        victims: list[ast.stmt] = []
        for node in body:
            name = _defined_name(node)
            if name and self._gone(f"{self._module.name}:{prefix}{name}"):
                victims.append(node)
            elif isinstance(node, ast.ClassDef) and not prefix:
                self._body(node.body, f"{node.name}.")
            elif not prefix:
                victims += self._loose(node)
        self._remove_statements(body, victims)

    def _loose(self, node: ast.stmt) -> list[ast.stmt]:
        """Edit a statement at the top that is no deleted definition; [node] if it goes whole."""
        if is_all(node):
            self._all(node)
        elif _bare_call(node):
            if self._graph.references_in(self._module.name, node) & self._symbols:
                return [node]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, Display):
            entries = _entries(node.value)
            gone = [
                _mentions(self._graph, self._module.name, entry, self._symbols) for entry in entries
            ]
            if any(gone):
                spans = [(self._offset(e[0]), self._end(e[-1])) for e in entries]
                is_tuple = isinstance(node.value, ast.Tuple)
                self._remove_elements(spans, gone, one_needs_comma=is_tuple)
        return []

    def _all(self, node: ast.stmt) -> None:
        call = isinstance(node, ast.Expr)
        for part in ast.walk(node):
            if isinstance(part, ast.List | ast.Tuple):
                gone = [self._names_gone(element) for element in part.elts]
                spans = [(self._offset(e), self._end(e)) for e in part.elts]
                is_tuple = isinstance(part, ast.Tuple)
                self._remove_elements(spans, gone, one_needs_comma=is_tuple)
            elif call and isinstance(part, ast.Call) and self._appends_gone(part):
                self._remove_statements(self._tree.body, [node])

    def _appends_gone(self, call: ast.Call) -> bool:
        return len(call.args) == 1 and self._names_gone(call.args[0])

    def _names_gone(self, element: ast.expr) -> bool:
        if not isinstance(element, ast.Constant) or not isinstance(element.value, str):
            return False
        return self._target_gone(self._graph.resolve(self._module.name, element.value))

    def _target_gone(self, target: str | None) -> bool:
        return target is not None and (target in self._symbols or target in self._modules)

    def _imports(self, body: list[ast.stmt]) -> None:
        victims: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.ImportFrom):
                origin = absolute_module(self._module.name, self._module.is_package, node)
                gone = [self._alias_gone(origin, alias) for alias in node.names]
            elif isinstance(node, ast.Import):
                gone = [alias.name in self._modules for alias in node.names]
            else:
                continue
            if all(gone):
                victims.append(node)
            elif any(gone):
                spans = [(self._offset(alias), self._end(alias)) for alias in node.names]
                self._remove_elements(spans, gone)
        self._remove_statements(body, victims)

    def _alias_gone(self, origin: str, alias: ast.alias) -> bool:
        if origin in self._modules:
            return True
        if alias.name == "*":
            return False
        return self._target_gone(self._graph.resolve(origin, alias.name))

    # Spans.

    def _offset(self, node: Located) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: Located) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _remove_elements(
        self,
        spans: Sequence[tuple[int, int]],
        gone: Sequence[bool],
        *,
        one_needs_comma: bool = False,
    ) -> None:
        """Cut entries out of a display, each with the comma that follows it.

        `one_needs_comma`: it is a tuple, so `("a", "b")` becomes `("a",)`.
        """
        kept = [index for index, is_gone in enumerate(gone) if not is_gone]
        last = kept[-1] if kept else -1
        for index, is_gone in enumerate(gone):
            if is_gone and index < last:
                self._spans.append(self._entry(*spans[index], spans[index + 1][0]))
        if spans and last < len(spans) - 1:
            start, end = spans[last][1] if kept else spans[0][0], spans[-1][1]
            after = _comma(self._source[end:])
            if kept and (after or (one_needs_comma and len(kept) == 1)):
                start = self._source.index(b",", start) + 1
            self._spans.append((start, end + after))
        elif one_needs_comma and len(kept) == 1 and not _comma(self._source[spans[last][1] :]):
            self._insert[spans[last][1]] = b","

    def _entry(self, start: int, end: int, following: int) -> tuple[int, int]:
        """From an entry up to the next one, whose indentation stays where it has its own line."""
        if b"\n" not in self._source[end:following]:
            return start, following
        line = self._source.rfind(b"\n", 0, start) + 1
        if self._source[line:start].strip():
            return start, self._source.index(b"\n", end)
        return line, self._source.rfind(b"\n", 0, following) + 1

    def _remove_statements(self, body: list[ast.stmt], victims: list[ast.stmt]) -> None:
        """Whole lines, with decorators and the comment that stands directly above."""
        for victim in victims:
            first = min([victim.lineno, *(d.lineno for d in _decorators(victim))])
            last = victim.end_lineno or victim.lineno
            for other in body:
                if (
                    other is not victim
                    and other.lineno <= last
                    and (other.end_lineno or 0) >= first
                ):
                    raise NotDeletableError("shared_line", f"{self._module.path}:{first}")
            indent = victim.col_offset
            while first > 1 and _is_comment(self._lines[first - 2], indent):
                first -= 1
            while last < len(self._lines) and not self._lines[last].strip():
                last += 1
            self._spans.append((self._starts[first - 1], self._starts[last]))
        if victims and len(victims) == len(body) and body is not self._tree.body:
            at = self._starts[victims[0].lineno - 1]
            self._insert[at] = b" " * victims[0].col_offset + b"pass\n\n"

    def _cut(self) -> bytes:
        if not self._spans:
            return self._source
        keep = bytearray(b"\1" * len(self._source))
        for start, end in self._spans:
            keep[start:end] = b"\0" * (end - start)
        lines: list[bytes] = []
        for number, line in enumerate(self._lines):
            start, end = self._starts[number], self._starts[number + 1]
            inserted = {at for at in self._insert if start <= at < end}
            if 0 not in keep[start:end] and not inserted:
                lines.append(line)
                continue
            left = b"".join(
                self._insert.get(at, b"") + (line[at - start : at - start + 1] if keep[at] else b"")
                for at in range(start, end)
            )
            if left.strip():
                lines.append(left if left.endswith(b"\n") else left.rstrip() + b"\n")
        joined = b"".join(lines)
        return joined.rstrip(b"\n") + b"\n" if joined.strip() else b""


def _comma(rest: bytes) -> int:
    """Length of what follows the last entry up to its comma."""
    stripped = rest.lstrip()
    return len(rest) - len(stripped) + 1 if stripped.startswith(b",") else 0


def _is_comment(line: bytes, indent: int) -> bool:
    text = line.lstrip()
    return text.startswith(b"#") and len(line) - len(text) == indent and not text.startswith(b"#!")


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return list(getattr(node, "decorator_list", []))


def _defined_name(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return ""


def code_line_numbers(symbol: Symbol, lines: Sequence[str]) -> Iterator[int]:
    """Lines (from 1) of a definition that are code: no docstrings, comments, blanks."""
    skipped: set[int] = set()
    for node in ast.walk(symbol.node):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                skipped.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    for number in range(symbol.first_line, symbol.last_line + 1):
        text = lines[number - 1].strip()
        if number not in skipped and text and not text.startswith("#"):
            yield number
