"""The static import and call graph of a package: who defines what, and who refers to it.

Names are resolved as Python's scopes do for straight code: local definitions, imports, re-exports,
`module.name`, `Class.method` and `self.method`. What only the running program knows (`x.method` of
an unknown `x`) is kept by name, in `Symbol.attributes`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from megacomposer.tasks.definitions import (
    Function,
    Kind,
    Module,
    Symbol,
    is_all,
    read_module,
    symbols_of,
)
from megacomposer.tasks.repository import Repository


class CallGraph:
    """All modules, symbols and references of a package."""

    def __init__(self, repository: Repository) -> None:
        """Raises ValueError where a file is not Python that this interpreter reads."""
        self.modules: dict[str, Module] = {}
        self.symbols: dict[str, Symbol] = {}
        for name, path in repository.modules.items():
            self._add_module(name, path, repository)
        self.users: dict[str, set[str]] = defaultdict(set)
        """Symbol id -> ids of symbols that refer to it; `module:` for code at the top level."""
        self.uses: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for owner, target in _References(self, module).collect():
                if target != owner:
                    self.users[target].add(owner)
                    self.uses[owner].add(target)

    def _add_module(self, name: str, path: str, repository: Repository) -> None:
        source = (repository.root / path).read_bytes()
        try:
            text = source.decode("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path}: not Python source in UTF-8: {error}") from error
        is_package = path.endswith("__init__.py")
        self.modules[name] = read_module(name, path, text, tree, is_package)
        for node in tree.body:
            for symbol in symbols_of(name, path, node):
                self.symbols[symbol.id] = symbol

    def resolve(self, module: str, name: str) -> str | None:
        """The symbol id or module name that `name` means at the top of `module`, through
        re-exports; None where it is not of this package."""
        return self._resolve(module, name, frozenset())

    def _resolve(self, module: str, name: str, seen: frozenset[str]) -> str | None:
        key = f"{module}:{name}"
        if module not in self.modules or key in seen:
            return None
        if key in self.symbols:
            return key
        target = self.modules[module].bindings.get(name)
        if target is not None:
            origin, separator, original = target.partition(":")
            if not separator:
                return origin if origin in self.modules else None
            if f"{origin}.{original}" in self.modules and not self._resolve(
                origin, original, seen | {key}
            ):
                return f"{origin}.{original}"
            return self._resolve(origin, original, seen | {key})
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        for origin in self.modules[module].star_imports:
            if found := self._resolve(origin, name, seen | {key}):
                return found
        return None

    def references_in(self, module: str, node: ast.AST) -> set[str]:
        """Symbols and modules that a piece of a module's top-level code refers to."""
        return _References(self, self.modules[module]).of(node)

    def methods(self, class_id: str) -> list[Symbol]:
        prefix = class_id + "."
        return [symbol for id, symbol in self.symbols.items() if id.startswith(prefix)]

    def exports(self, id: str) -> list[str]:
        """Every dotted path by which the package offers a symbol, its own module first."""
        symbol = self.symbols[id]
        paths = [f"{symbol.module}.{symbol.qualname}"]
        if symbol.kind is Kind.METHOD:
            return paths
        for module in self.modules.values():
            names = [name for name, _ in module.bindings.items()]
            if module.star_imports:
                names.append(symbol.name)
            for name in names:
                if module.name != symbol.module and self.resolve(module.name, name) == id:
                    paths.append(f"{module.name}.{name}")
        return list(dict.fromkeys(paths))


# References -------------------------------------------------------------------------------------


class _References(ast.NodeVisitor):
    """(owner, target) for every reference in one module that resolves to a symbol or module."""

    def __init__(self, graph: CallGraph, module: Module) -> None:
        self._graph, self._module = graph, module
        self._owner = f"{module.name}:"
        self._class = ""
        self._hidden: list[set[str]] = []
        self._found: list[tuple[str, str]] = []

    def collect(self) -> list[tuple[str, str]]:
        for node in self._module.tree.body:
            if is_all(node):
                continue
            ids = [symbol.id for symbol in symbols_of(self._module.name, "", node)]
            self._owner = ids[0] if ids else f"{self._module.name}:"
            self._class = ids[0] if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.ClassDef):
                self._visit_class(node)
            else:
                self.visit(node)
        return self._found

    def of(self, node: ast.AST) -> set[str]:
        self.visit(node)
        return {target for _, target in self._found}

    def _visit_class(self, node: ast.ClassDef) -> None:
        class_id = self._owner
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        for inner in node.body:
            self._owner = class_id
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                # Decorators and defaults run with the class body.
                defaults = (*inner.args.defaults, *inner.args.kw_defaults)
                for early in (*inner.decorator_list, *defaults):
                    if early is not None:
                        self.visit(early)
                self._owner = f"{class_id}.{inner.name}"
            self.visit(inner)

    def _visit_scope(self, node: Function | ast.Lambda) -> None:
        bound = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        if not isinstance(node, ast.Lambda):
            for statement in node.body:
                if not isinstance(statement, ast.Import | ast.ImportFrom):
                    bound.update(_local_names(statement))
        self._hidden.append(bound)
        self.generic_visit(node)
        self._hidden.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_scope(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_scope(node)

    def _resolve(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            if any(node.id in names for names in self._hidden):
                return None
            in_class = f"{self._class}.{node.id}"
            if self._class and self._owner == self._class and in_class in self._graph.symbols:
                return in_class  # the class body uses a method above it, such as `__iter__ = keys`
            return self._graph.resolve(self._module.name, node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and self._class:
            return self._method(self._class, node.attr)
        base = self._resolve(node.value)
        if base in self._graph.modules:
            return self._graph.resolve(base, node.attr)
        if base in self._graph.symbols:
            return self._method(base, node.attr)
        return None

    def _method(self, class_id: str, name: str, depth: int = 8) -> str | None:
        found = f"{class_id}.{name}"
        if found in self._graph.symbols:
            return found
        symbol = self._graph.symbols.get(class_id)
        if symbol is None or not isinstance(symbol.node, ast.ClassDef) or not depth:
            return None
        for base in symbol.node.bases:
            if isinstance(base, ast.Name):
                parent = self._graph.resolve(symbol.module, base.id)
                if parent and (inherited := self._method(parent, name, depth - 1)):
                    return inherited
        return None

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (target := self._resolve(node)):
            self._found.append((self._owner, target))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if target := self._resolve(node):
            self._found.append((self._owner, target))
        self.visit(node.value)


def _local_names(node: ast.stmt) -> Iterator[str]:
    """Bound inside a function: not the module's name of the same spelling. Imports are not
    counted, since an import of this package's own name inside a function is a reference."""
    if isinstance(node, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
