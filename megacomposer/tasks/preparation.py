"""A repository made ready for deleting: scrubbed, analysed, its tests run and measured."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megacomposer.config import Config
from megacomposer.env.grading.python_runtime import install_site, python_runtime
from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.sandbox import Limits, SandboxBackend, Snapshot
from megacomposer.env.task import TestPlan
from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.features import KINDS, words_of_tests
from megacomposer.tasks.proof import Intact, ProofLimits, Prover
from megacomposer.tasks.repository import Repository, describe_repository, open_repository
from megacomposer.tasks.residue import Part, files_of_tree, image_parts, published_files
from megacomposer.tasks.scrub import scrub_tree

SITE = "site"
"""Beside the tasks: the packages that their tests need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureDeletionConfig(Config):
    """What tasks to make."""

    count: int = 10
    """Tasks to keep; fewer where the candidates end."""
    kinds: tuple[str, ...] = KINDS
    """Of function, class, module, multi; each gets an equal part of `count` while it lasts."""
    seed: int = 0
    """Fixes the order of candidates and of tests."""
    max_candidates: int = 0
    """Proofs to try at most; 0: 8 times `count`."""
    parallel: int = 2
    """Candidates that are proven at once."""
    requires: tuple[str, ...] = ()
    """Packages for the tests beside pytest, as pip spells them."""
    site: Path | None = None
    """A directory that already holds pytest and all that the tests need: nothing is installed."""
    pytest_args: tuple[str, ...] = ()
    """More arguments of pytest, such as ("-p", "pytest_mock")."""
    timeout_s: float = 300.0
    """Of one run of the tests."""
    min_target_tests: int = 2
    """Tests that a task makes fail, at least."""
    max_target_share: float = 0.8
    """Part of the stable tests that a task makes fail, at most."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ValueError(
                f"kinds: {', '.join(unknown) or 'none'}; choose from {', '.join(KINDS)}"
            )
        for field in ("count", "parallel"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSource:
    """One repository, analysed and measured."""

    repository: Repository
    graph: CallGraph
    intact: Intact
    prover: Prover
    verifier: Verifier
    pristine: Snapshot
    plan: TestPlan
    site: Path
    site_parts: list[Part]
    published: frozenset[str]
    words: frozenset[str]
    out: Path
    scratch: Path


async def prepare(
    config: FeatureDeletionConfig,
    backend: SandboxBackend,
    source: Path,
    out: Path,
    scratch: Path,
    progress: Callable[[str], None],
) -> PreparedSource:
    """Also installs OUT/site. ValueError where `source` is no project with tests that run."""
    unpacked = open_repository(source, scratch / "unpacked")
    tree = scratch / "intact"
    removed = scrub_tree(unpacked.root, tree)
    repository = dataclasses.replace(
        describe_repository(tree, fallback_name=unpacked.name),
        name=unpacked.name,
        version=unpacked.version,
        licence=unpacked.licence,
        requires=unpacked.requires,
        archive_sha256=unpacked.archive_sha256,
    )
    progress(f"{repository.name} {repository.version}: {len(removed)} paths scrubbed")
    graph = CallGraph(repository)
    site = out / SITE
    await _fill_site(config, repository, site)
    _check_site(site, repository)
    runtime = python_runtime(site, in_place=not backend.isolates)
    plan = TestPlan(
        command=config.pytest_args,
        protected_paths=repository.protected_paths,
        timeout_s=config.timeout_s,
    )
    limits = ProofLimits(
        min_target_tests=config.min_target_tests,
        max_target_share=config.max_target_share,
    )
    prover = Prover(
        backend, runtime, repository, graph,
        limits=limits, sandbox_limits=Limits(), plan=plan,
    )  # fmt: skip
    intact = await prover.intact(await backend.import_tree(str(tree)), config.seed)
    progress(
        f"{len(intact.stable)} stable tests, {intact.unstable} left out, "
        f"{intact.wall_s:.1f} s a run"
    )
    return PreparedSource(
        repository=repository,
        graph=graph,
        intact=intact,
        prover=prover,
        verifier=Verifier(backend, runtime=runtime, lint=False),
        pristine=await _pristine(backend, repository, scratch / "pristine"),
        plan=plan,
        site=site,
        site_parts=await asyncio.to_thread(image_parts, files_of_tree(site)),
        published=frozenset(published_files(site)),
        words=frozenset(words_of_tests(repository)),
        out=out,
        scratch=scratch,
    )


async def _fill_site(config: FeatureDeletionConfig, repository: Repository, site: Path) -> None:
    """pytest and what the tests need, without bytecode and without the package itself."""
    if config.site is not None:
        if not config.site.is_dir():
            raise ValueError(f"site {config.site} is no directory")
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(config.site, site, ignore=ignored)
        site.chmod(0o755)  # for the user inside
    else:
        wanted = ["pytest", *repository.requires, *config.requires]
        exclude = [repository.name]
        await install_site(wanted, site, exclude=exclude, options=["--no-compile"])


def _check_site(site: Path, repository: Repository) -> None:
    for name in repository.import_names:
        if (site / name).exists() or (site / f"{name}.py").exists():
            raise ValueError(
                f"{repository.name}: what its tests need holds a copy of `{name}` itself, "
                "where deleted code could be read; make tasks of another package"
            )


async def _pristine(backend: SandboxBackend, repository: Repository, directory: Path) -> Snapshot:
    """The true tests and configuration alone: whoever sees it does not see the answer."""
    package = set(repository.modules.values())
    patterns = [_regex(pattern) for pattern in repository.protected_paths]
    directory.mkdir()
    for path in sorted(repository.root.rglob("*")):
        relative = path.relative_to(repository.root).as_posix()
        is_ours = any(pattern.fullmatch(relative) for pattern in patterns)
        if path.is_file() and is_ours and relative not in package:
            target = directory / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return await backend.import_tree(str(directory))


def _regex(pattern: str) -> re.Pattern[str]:
    """`protected_paths` are exact paths, or a directory with `/**`."""
    if pattern.endswith("/**"):
        return re.compile(re.escape(pattern.removesuffix("**")) + ".*")
    return re.compile(re.escape(pattern))
