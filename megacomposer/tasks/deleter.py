"""Who proposes what to delete. The pipeline proves every proposal the same way."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.deletion import NotDeletableError, delete
from megacomposer.tasks.features import FeatureLimits, find_features
from megacomposer.tasks.funnel import RejectedError
from megacomposer.tasks.repository import Repository


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A deletion: complete new contents of the files that change."""

    name: str
    """Short, for the task's id: letters, digits and dashes."""
    kind: str
    """One of `features.KINDS`."""
    edits: Mapping[str, bytes | None]
    """Path -> content without the feature; None: the file goes. Package code only."""
    statement: str = ""
    """The task in words; "": `write_statement` says what signatures and documentation say."""
    fan_in: int = 0
    """How many places of the rest of the package named it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unusable:
    """A candidate that a deleter itself turned away, for the funnel."""

    name: str
    error: RejectedError


class Deleter(Protocol):
    """Finds features to delete. A language model that edits a copy of the tree fits as well as the
    static analysis: only the resulting files count."""

    name: str

    def propose(
        self, repository: Repository, graph: CallGraph, *, kinds: Sequence[str], seed: int
    ) -> AsyncIterator[Proposal | Unusable]:
        """Candidates, the most wanted first; the pipeline takes as many as it needs."""
        ...


class StaticDeleter:
    """By the import and call graph; see `features`."""

    name = "static"

    def __init__(self, limits: FeatureLimits | None = None) -> None:
        self._limits = limits or FeatureLimits()

    async def propose(
        self, repository: Repository, graph: CallGraph, *, kinds: Sequence[str], seed: int
    ) -> AsyncIterator[Proposal | Unusable]:
        """See `Deleter.propose`. Mixes kinds; `seed` fixes the order."""
        found = find_features(repository, graph, kinds=kinds, seed=seed, limits=self._limits)
        for feature in found:
            if isinstance(feature, tuple):
                name, error = feature
                yield Unusable(name=name, error=RejectedError(error.reason, str(error)))
                continue
            try:
                edits = delete(graph, repository.root, feature.symbols, feature.modules)
            except NotDeletableError as error:
                rejected = RejectedError(error.reason, str(error))
                yield Unusable(name=feature.seed, error=rejected)
                continue
            yield Proposal(name=feature.id, kind=feature.kind, edits=edits, fan_in=feature.fan_in)


def symbols_gone(graph: CallGraph, edits: Mapping[str, bytes | None]) -> frozenset[str]:
    """Ids of the definitions that edits take away; the methods of a class that goes are not
    listed beside it. RejectedError where an edited file is not Python, or gains definitions."""
    gone: set[str] = set()
    for module in graph.modules.values():
        if module.path not in edits:
            continue
        before = {
            symbol.qualname for symbol in graph.symbols.values() if symbol.module == module.name
        }
        after = _definitions(module.path, edits[module.path])
        if after - before:
            raise RejectedError("incomplete", f"{module.path} gains {sorted(after - before)[0]}")
        gone.update(f"{module.name}:{qualname}" for qualname in before - after)
    return frozenset(id for id in gone if graph.symbols[id].owner_class not in gone)


def _definitions(path: str, source: bytes | None) -> set[str]:
    if source is None:
        return set()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise RejectedError("broken_syntax", f"{path}: {error}") from error
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(part.id for part in targets if isinstance(part, ast.Name))
    return found - {"__all__"}
