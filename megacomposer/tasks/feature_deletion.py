"""From a repository with tests to proven tasks: propose, delete, prove, scan, write.

maker = FeatureDeletion(config, backend, site=site)
report = await maker.make(Path("toolz-1.0.0.tar.gz"), Path("tasks"))
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacomposer.env.grading.python_runtime import SITE_TARGET
from megacomposer.env.sandbox import WORKDIR, Mount, SandboxBackend, Snapshot
from megacomposer.env.task import Task
from megacomposer.tasks.bundle import load_bundle, save_bundle
from megacomposer.tasks.deleter import (
    Deleter,
    Proposal,
    StaticDeleter,
    symbols_gone,
)
from megacomposer.tasks.deletion import code_line_numbers
from megacomposer.tasks.funnel import Funnel, RejectedError
from megacomposer.tasks.preparation import FeatureDeletionConfig, PreparedSource, prepare
from megacomposer.tasks.proof import prove_answers
from megacomposer.tasks.proposal_queue import ProposalQueue
from megacomposer.tasks.repository import Repository
from megacomposer.tasks.residue import (
    ScanLimitError,
    files_of_layer,
    image_parts,
    scan_site,
    scan_workspace,
    traces_of,
)
from megacomposer.tasks.scrub import commit_root, diff_between, write_edits
from megacomposer.tasks.statement import write_statement


class FeatureDeletion:
    """The pipeline, for one backend."""

    def __init__(
        self,
        config: FeatureDeletionConfig,
        backend: SandboxBackend,
        *,
        deleter: Deleter | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config, self._backend = config, backend
        self._deleter: Deleter = deleter or StaticDeleter()
        self._progress = progress

    async def make(self, source: Path, out: Path) -> dict[str, Any]:
        """Write tasks of `source` under `out`; returns the funnel with the package's data.

        Raises ValueError where `source` is no project with tests that run, or `out` is not empty,
        and SandboxError where the infrastructure failed.
        """
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"out {out} is not empty: name a new directory")
        out = out.resolve()
        began = time.monotonic()
        scratch = out / ".scratch"
        scratch.mkdir(parents=True)
        try:
            prepared = await prepare(
                self._config, self._backend, source, out, scratch, self._progress
            )
            funnel = Funnel()
            await self._run(prepared, funnel)
        finally:
            shutil.rmtree(scratch)
        repository = prepared.repository
        return {
            "package": repository.name,
            "version": repository.version,
            "licence": repository.licence,
            "sdist_sha256": repository.archive_sha256,
            "deleter": self._deleter.name,
            "backend": self._backend.name,
            "stable_tests": len(prepared.intact.stable),
            "unstable_tests": prepared.intact.unstable,
            "suite_s": round(prepared.intact.wall_s, 2),
            **funnel.report(),
            "seconds": round(time.monotonic() - began, 1),
        }

    # Candidates.

    async def _run(self, source: PreparedSource, funnel: Funnel) -> None:
        """Several workers take proposals from one stream, until enough are kept."""
        stream = self._deleter.propose(
            source.repository, source.graph, kinds=self._config.kinds, seed=self._config.seed
        )
        queue = ProposalQueue(
            stream,
            funnel,
            kinds=self._config.kinds,
            count=self._config.count,
            max_candidates=self._config.max_candidates or 8 * self._config.count,
        )
        workers = [
            asyncio.create_task(self._work(source, queue, funnel))
            for _ in range(self._config.parallel)
        ]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            raise

    async def _work(self, source: PreparedSource, queue: ProposalQueue, funnel: Funnel) -> None:
        while (proposal := await queue.next()) is not None:
            began = time.monotonic()
            try:
                symbols = symbols_gone(source.graph, proposal.edits)
                queue.reserve(proposal, symbols)
                task = await self._attempt(source, proposal, symbols)
            except RejectedError as error:
                queue.give_up(proposal)
                funnel.reject(proposal.name, error)
                self._progress(f"- {proposal.name}: {error}"[:200])
                continue
            seconds = round(time.monotonic() - began, 1)
            funnel.kept.append(
                {"id": task.id, "kind": proposal.kind, **task.difficulty, "seconds": seconds}
            )
            self._progress(f"+ {task.id}: {len(task.tests.fail_to_pass)} target tests, {seconds} s")

    async def _attempt(
        self, source: PreparedSource, proposal: Proposal, symbols: frozenset[str]
    ) -> Task:
        """One candidate, from cheap checks to dear ones. RejectedError."""
        graph = source.graph
        modules = frozenset(
            name
            for name, module in graph.modules.items()
            if proposal.edits.get(module.path, b"") is None
        )
        try:
            statement = proposal.statement or write_statement(
                source.repository, graph, proposal.kind, symbols, modules, source.words
            )
        except ValueError as error:
            raise RejectedError("no_description", str(error)) from error
        task_id = _task_id(source.repository, proposal)
        scratch = source.scratch / task_id
        tree = scratch / "tree"
        try:
            shutil.copytree(source.repository.root, tree)
            write_edits(tree, proposal.edits)
            patch = await asyncio.to_thread(diff_between, tree, source.repository.root, scratch)
            await asyncio.to_thread(commit_root, tree)
            base = await self._backend.import_tree(str(tree))
            targets = await source.prover.deleted(
                base, source.intact, symbols, modules, self._config.seed + 1
            )
            task = self._task(
                source, proposal, symbols, modules, task_id, statement, base, patch, targets
            )
            staged = scratch / task_id
            await save_bundle(task, self._backend, staged, source.out)
            await asyncio.to_thread(_scan, source, task, staged, tree, symbols, modules)
            # From the files that are shipped, so that what is missing in them shows here.
            loaded = await load_bundle(staged, self._backend, home=source.out)
            await prove_answers(source.verifier, loaded)
            staged.rename(source.out / task_id)
            return task
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _task(
        self,
        source: PreparedSource,
        proposal: Proposal,
        symbols: frozenset[str],
        modules: frozenset[str],
        task_id: str,
        statement: str,
        base: Snapshot,
        patch: bytes,
        targets: tuple[str, ...],
    ) -> Task:
        repository = source.repository
        try:
            gold = patch.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RejectedError("not_text", str(error)) from error
        chosen = set(targets)
        paths = [str(WORKDIR / "src")] if repository.source_root else []
        return Task(
            id=task_id,
            instruction=statement,
            base=base,
            pristine=source.pristine,
            tests=dataclasses.replace(
                source.plan,
                fail_to_pass=targets,
                pass_to_pass=tuple(name for name in source.intact.stable if name not in chosen),
            ),
            mounts=(Mount(source=str(source.site.resolve()), target=SITE_TARGET),),
            env={
                "PYTHONPATH": ":".join([*paths, str(WORKDIR), SITE_TARGET]),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            gold_patch=gold,
            origin={
                "kind": "feature_deletion",
                "feature": proposal.kind,
                "deleter": self._deleter.name,
                "repository": repository.name,
                "version": repository.version,
                "licence": repository.licence,
                "sdist_sha256": repository.archive_sha256,
                "deleted": sorted(symbols),
                "deleted_modules": sorted(modules),
                "requires": ["pytest", *repository.requires, *self._config.requires],
            },
            difficulty=_difficulty(source, proposal, symbols, len(targets), statement),
        )


def _difficulty(
    source: PreparedSource,
    proposal: Proposal,
    symbols: frozenset[str],
    targets: int,
    statement: str,
) -> dict[str, float]:
    """Estimates at making, for `Task.difficulty`."""
    chosen = [source.graph.symbols[id] for id in symbols]
    deleted_lines = 0
    for symbol in chosen:
        lines = source.graph.modules[symbol.module].source.splitlines()
        deleted_lines += sum(1 for _ in code_line_numbers(symbol, lines))
    return {
        "deleted_lines": deleted_lines,
        "symbols": len(symbols),
        "files": len({symbol.path for symbol in chosen}),
        "edited_files": len(proposal.edits),
        "target_tests": targets,
        "target_share": round(targets / len(source.intact.stable), 4),
        "fan_in": proposal.fan_in,
        "instruction_chars": len(statement),
    }


def _scan(
    source: PreparedSource,
    task: Task,
    staged: Path,
    tree: Path,
    symbols: frozenset[str],
    modules: frozenset[str],
) -> None:
    """Every byte of the shipped layers and of the mounted packages. RejectedError."""
    repository = source.repository
    kept = [
        path
        for path in (*repository.modules.values(), *repository.test_files)
        if (tree / path).is_file()
    ]
    try:
        traces = traces_of(source.graph, symbols, modules, tree, kept)
        parts = [
            part
            for digest in task.base.layers
            for part in image_parts(files_of_layer(staged / "layers" / f"{digest}.tar"))
        ]
        found = scan_workspace(traces, parts)
        found += scan_site(traces, source.site_parts, repository.import_names, source.published)
    except ScanLimitError as error:
        raise RejectedError("residue", str(error)) from error
    if found:
        first = found[0]
        detail = f"{first.trace[:60]!r} ({first.encoding}) in {first.path}; {len(found)} in all"
        raise RejectedError("residue", detail)


def _task_id(repository: Repository, proposal: Proposal) -> str:
    package = re.sub(r"[^a-z0-9]+", "-", repository.name.lower()).strip("-")
    content = "\0".join(f"{path}={edit!r}" for path, edit in sorted(proposal.edits.items()))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{package}-{proposal.name[:60].strip('-')}-{digest}"
