"""Candidates: coherent pieces of a package that can be taken out together.

A candidate grows from a seed. Callers inside the package that would break go with it, and so do
private things that nothing else uses. What stays behind never names what is gone.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence, Set

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Kind, Symbol
from megacomposer.tasks.deletion import (
    NotDeletableError,
    code_line_numbers,
    registers,
    table_use,
)
from megacomposer.tasks.repository import Repository

KINDS = ("function", "class", "module", "multi")
"""One function or method with its private parts; a class; whole files; several files."""
_RARE_FIRST = ("module", "multi", "class", "function")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureLimits:
    """Which candidates are worth a proof."""

    min_code_lines: int = 4
    """Deleted lines that are code."""
    max_code_lines: int = 600
    max_symbols: int = 60
    """Functions, methods outside deleted classes, classes and variables."""
    max_files: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """A closed set of symbols; `delete` accepts it."""

    kind: str
    """One of KINDS."""
    seed: str
    symbols: frozenset[str]
    """Ids; the methods of a deleted class are not listed again."""
    modules: frozenset[str]
    """Modules that go as whole files."""
    code_lines: int
    files: tuple[str, ...]
    """Files that lose definitions."""
    fan_in: int
    """References from the rest of the package that went with it: imports and tables."""

    @property
    def id(self) -> str:
        """A short name for file names and ids."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{self.seed}".lower()).strip("-")


def find_features(
    repository: Repository,
    graph: CallGraph,
    *,
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
    limits: FeatureLimits | None = None,
) -> Iterator[Feature | tuple[str, NotDeletableError]]:
    """Candidates of all kinds in a mixed order that `seed` fixes, or (seed symbol, why not).

    No set of symbols comes twice.
    """
    limits = limits or FeatureLimits()
    tests = words_of_tests(repository)
    queues = {kind: list(_seeds(graph, kind)) for kind in kinds}
    for kind in kinds:
        random.Random(f"{seed}/{kind}").shuffle(queues[kind])
    seen: set[frozenset[str]] = set()
    while any(queues.values()):
        for kind in sorted(kinds, key=_RARE_FIRST.index):
            while queues[kind]:
                name, start, modules = queues[kind].pop()
                try:
                    feature = _grow(graph, kind, name, start, modules, tests, limits)
                except NotDeletableError as error:
                    yield name, error
                    continue
                if feature is None or feature.symbols in seen:
                    continue
                seen.add(feature.symbols)
                yield feature
                break


Seed = tuple[str, frozenset[str], frozenset[str]]


def _seeds(graph: CallGraph, kind: str) -> Iterator[Seed]:
    none: frozenset[str] = frozenset()
    for symbol in graph.symbols.values():
        if not symbol.public:
            continue
        callable_ = symbol.kind in (Kind.FUNCTION, Kind.METHOD)
        if kind == "function" and callable_ or kind == "class" and symbol.kind is Kind.CLASS:
            yield symbol.id, frozenset({symbol.id}), none
        elif kind == "multi" and symbol.kind is not Kind.METHOD:
            yield symbol.id, frozenset({symbol.id}), none
            for other in sorted(graph.uses[symbol.id]):
                target = graph.symbols.get(other)
                if target and target.module != symbol.module and target.kind is not Kind.METHOD:
                    yield symbol.id, frozenset({symbol.id, other}), none
    if kind == "module":
        for module in graph.modules.values():
            if not module.is_package and len(graph.modules) > 1:
                owned = {
                    symbol.id
                    for symbol in graph.symbols.values()
                    if symbol.module == module.name and symbol.kind is not Kind.METHOD
                }
                yield module.name, frozenset(owned), frozenset({module.name})


def _grow(
    graph: CallGraph,
    kind: str,
    name: str,
    start: frozenset[str],
    modules: frozenset[str],
    tests: Set[str],
    limits: FeatureLimits,
) -> Feature | None:
    """None where the closure turns out to be of another kind."""
    symbols = set(start)
    while True:
        before = len(symbols)
        for id in sorted(symbols):
            symbols |= _callers(graph, id, symbols, modules)
            if len(symbols) > limits.max_symbols and not modules:
                raise NotDeletableError("entangled", f"{name} takes more than {len(symbols)} along")
        symbols |= _orphans(graph, symbols, tests)
        if len(symbols) == before:
            break
    symbols = {id for id in symbols if graph.symbols[id].owner_class not in symbols}
    for id in symbols:
        symbol = graph.symbols[id]
        if (
            symbol.module not in modules
            and symbol.qualname in graph.modules[symbol.module].ambiguous
        ):
            raise NotDeletableError("ambiguous_definition", id)
    if _kind_of([graph.symbols[id] for id in symbols], modules) != kind:
        return None
    return feature_of(graph, name, symbols, modules, limits)


def feature_of(
    graph: CallGraph,
    name: str,
    symbols: Set[str],
    modules: frozenset[str],
    limits: FeatureLimits,
) -> Feature:
    """What these symbols are together. Raises NotDeletableError where that is over the limits."""
    chosen = [graph.symbols[id] for id in symbols]
    lines = sum(_code_lines(graph, symbol) for symbol in chosen)
    files = tuple(sorted({symbol.path for symbol in chosen}))
    if not limits.min_code_lines <= lines <= limits.max_code_lines:
        word = "too_small" if lines < limits.min_code_lines else "too_large"
        raise NotDeletableError(word, f"{name}: {lines} lines of code")
    if len(files) > limits.max_files:
        raise NotDeletableError("too_large", f"{name}: {len(files)} files")
    users = {user for symbol in chosen for user in graph.users[symbol.id]} - symbols
    return Feature(
        kind=_kind_of(chosen, modules),
        seed=name,
        symbols=frozenset(symbols),
        modules=modules,
        code_lines=lines,
        files=files,
        fan_in=len(users) + sum(len(graph.exports(symbol.id)) - 1 for symbol in chosen),
    )


def _kind_of(symbols: list[Symbol], modules: frozenset[str]) -> str:
    files = {symbol.path for symbol in symbols}
    if modules:
        return "module"
    if len(files) > 1:
        return "multi"
    if any(symbol.kind is Kind.CLASS for symbol in symbols):
        return "class"
    return "function"


def _code_lines(graph: CallGraph, symbol: Symbol) -> int:
    lines = graph.modules[symbol.module].source.splitlines()
    return sum(1 for _ in code_line_numbers(symbol, lines))


def _callers(graph: CallGraph, id: str, symbols: Set[str], modules: Set[str]) -> set[str]:
    """What would break without `id` and must go too."""
    more: set[str] = set()
    symbol = graph.symbols[id]
    # Modules that go whole are closed by their files; ids of methods name their class's users too.
    targets = [id, *(method.id for method in graph.methods(id))]
    gone = symbols | set(targets)
    for target in targets:
        for user in sorted(graph.users[target]):
            if user in gone or user.rpartition(".")[0] in symbols:
                continue
            owner = graph.symbols.get(user)
            if owner is None:
                module = user.rstrip(":")
                if module not in modules and not registers(graph, module, gone):
                    raise NotDeletableError("import_time_use", f"{id} in {module}")
            elif owner.kind is Kind.VARIABLE and table_use(graph, owner, gone):
                continue
            elif owner.kind is Kind.METHOD and owner.name.startswith("__"):
                more.add(owner.owner_class)
            else:
                more.add(user)
    if symbol.kind is Kind.METHOD:
        more |= _callers_by_name(graph, symbol)
    return more


def _callers_by_name(graph: CallGraph, method: Symbol) -> set[str]:
    """Users of `x.method` for an `x` of unknown type, where one class alone has such a method."""
    same = [other for other in graph.symbols.values() if other.name == method.name]
    if len(same) > 1:
        return set()
    return {
        other.id if not other.name.startswith("__") else other.owner_class or other.id
        for other in graph.symbols.values()
        if method.name in other.attributes
        and other.id != method.id
        and other.kind is not Kind.CLASS
    }


def _orphans(graph: CallGraph, symbols: Set[str], tests: Set[str]) -> set[str]:
    """Private things that only the deleted code used."""
    more: set[str] = set()
    for id in symbols:
        inside = {id, *(method.id for method in graph.methods(id))}
        for used in {target for part in inside for target in graph.uses[part]}:
            other = graph.symbols.get(used)
            if other is None or used in symbols or other.owner_class in symbols:
                continue
            private = other.name.startswith("_") and not other.name.endswith("__")
            if not private and other.kind is not Kind.VARIABLE:
                continue
            if other.name in tests or other.name in graph.modules[other.module].all_names:
                continue
            if other.qualname in graph.modules[other.module].ambiguous:
                continue
            if all(_within(graph, user, symbols, used) for user in graph.users[used]):
                more.add(used)
    return more


def _within(graph: CallGraph, user: str, symbols: Set[str], used: str) -> bool:
    owner = graph.symbols.get(user)
    if owner is None:
        return False
    return user in symbols or owner.owner_class in symbols or user == used


def words_of_tests(repository: Repository) -> set[str]:
    """Every word in the test files."""
    words: set[str] = set()
    for path in repository.test_files:
        text = (repository.root / path).read_text(encoding="utf-8", errors="replace")
        words.update(re.findall(r"\w+", text))
    return words
