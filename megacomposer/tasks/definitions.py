"""What a file of Python defines at its top: symbols, imports, exports."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Kind(enum.StrEnum):
    FUNCTION = "function"
    CLASS = "class"
    METHOD = "method"
    VARIABLE = "variable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symbol:
    """A definition at the top of a module, or a method of a class there."""

    id: str
    """`package.module:Class.method`."""
    module: str
    qualname: str
    path: str
    kind: Kind
    node: Definition = dataclasses.field(repr=False, compare=False, hash=False)
    attributes: frozenset[str] = dataclasses.field(repr=False, compare=False, hash=False)
    """Every name after a dot inside it."""

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def owner_class(self) -> str:
        """The id of a method's class; "" for others."""
        head, _, _ = self.qualname.rpartition(".")
        return f"{self.module}:{head}" if head else ""

    @property
    def public(self) -> bool:
        return not any(part.startswith("_") for part in self.qualname.split("."))

    @property
    def docstring(self) -> str:
        if isinstance(self.node, ast.Assign | ast.AnnAssign):
            return ""
        return ast.get_docstring(self.node) or ""

    @property
    def first_line(self) -> int:
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])

    @property
    def last_line(self) -> int:
        return self.node.end_lineno or self.node.lineno


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the package."""

    name: str
    path: str
    source: str
    tree: ast.Module
    is_package: bool
    bindings: Mapping[str, str]
    """Name -> what it is at the top: a symbol id, a module's name, or "from-module:name"."""
    star_imports: tuple[str, ...]
    ambiguous: frozenset[str]
    """Names that are bound several times, or inside `if` or `try`: not safe to delete."""
    all_names: frozenset[str]
    """What stands as a string in `__all__`."""


def symbols_of(module: str, path: str, node: ast.stmt) -> Iterator[Symbol]:
    """What a statement at the top of a module defines; a class, then its methods."""

    def symbol(qualname: str, kind: Kind, definition: Definition) -> Symbol:
        return Symbol(
            id=f"{module}:{qualname}",
            module=module,
            qualname=qualname,
            path=path,
            kind=kind,
            node=definition,
            attributes=frozenset(
                part.attr for part in ast.walk(definition) if isinstance(part, ast.Attribute)
            ),
        )

    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield symbol(node.name, Kind.FUNCTION, node)
    elif isinstance(node, ast.ClassDef):
        yield symbol(node.name, Kind.CLASS, node)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                yield symbol(f"{node.name}.{inner.name}", Kind.METHOD, inner)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id != "__all__":
            yield symbol(targets[0].id, Kind.VARIABLE, node)


def read_module(name: str, path: str, text: str, tree: ast.Module, is_package: bool) -> Module:
    """The names of one parsed file."""
    bindings: dict[str, str] = {}
    stars: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                bindings[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom):
            origin = absolute_module(name, is_package, node)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(origin)
                else:
                    bindings[alias.asname or alias.name] = f"{origin}:{alias.name}"
    return Module(
        name=name,
        path=path,
        source=text,
        tree=tree,
        is_package=is_package,
        bindings=bindings,
        star_imports=tuple(stars),
        ambiguous=frozenset(_ambiguous(tree)),
        all_names=frozenset(_all_names(tree)),
    )


def absolute_module(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The dotted name that an `import from` reads, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    kept = parts[: len(parts) - (node.level - 1)]
    return ".".join([*kept, node.module] if node.module else kept)


def is_all(node: ast.stmt) -> bool:
    """Whether a statement sets or extends `__all__`."""
    if isinstance(node, ast.Assign):
        return any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == "__all__"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "__all__"
        )
    return False


def _all_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if is_all(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _ambiguous(tree: ast.Module) -> Iterator[str]:
    seen: set[str] = set()
    for node in tree.body:
        names = set(_bound_names(node))
        if isinstance(node, ast.If | ast.Try | ast.For | ast.While | ast.With):
            yield from names
        yield from names & seen
        seen |= names
        if isinstance(node, ast.ClassDef):
            inner_seen: set[str] = set()
            for inner in node.body:
                inner_names = {f"{node.name}.{part}" for part in _bound_names(inner)}
                yield from inner_names & inner_seen
                inner_seen |= inner_names


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its own scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    if isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from _bound_names(child)
