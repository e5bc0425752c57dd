"""A deleter that asks a language model behind an OpenAI-compatible HTTP endpoint.

Its answers are read strictly, and the pipeline proves them like any other proposal. An answer that
is no deletion is counted by its reason; an endpoint that does not answer ends the run.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import os
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence, Set

import msgspec

from megacomposer.env.chat_endpoint import ChatAnswer, ChatEndpoint, ChatEndpointConfig, ChatError
from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Function, Kind, Module, symbols_of
from megacomposer.tasks.deleter import Deleter, Proposal, StaticDeleter, Unusable, symbols_gone
from megacomposer.tasks.deletion import NotDeletableError
from megacomposer.tasks.deletion_prompt import PackageText
from megacomposer.tasks.features import FeatureLimits, feature_of
from megacomposer.tasks.funnel import RejectedError
from megacomposer.tasks.repository import Repository

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the endpoint's key; without it, requests carry none."""
_EARLIER = 40
_PASSING = frozenset({0, 408, 409, 425, 429})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDeleterConfig(ChatEndpointConfig):
    """Which model, and how much it is asked."""

    timeout_s: float = 300.0
    """Of one request."""
    attempts: int = 4
    """Requests until a question counts as failed, and the run with it. Our choice."""
    retry_wait_s: float = 2.0
    """Before the second request for a question; twice as long before each further one."""
    max_questions: int = 64
    """Features to ask for, at most. Our choice."""
    outline_chars: int = 20_000
    """Length of the list of symbols in a question, at most. Our choice."""
    source_chars: int = 60_000
    """Length of the source in a question, at most. Our choice."""
    max_answer_tokens: int = 8000
    """Limit of an answer. Our choice."""
    temperature: float = 0.7
    """Above 0, so that answers differ. Our choice."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_questions < 1 or self.retry_wait_s < 0:
            raise ValueError("max_questions must be >= 1, retry_wait_s >= 0")
        if self.outline_chars < 1000 or self.source_chars < 1000:
            raise ValueError("outline_chars and source_chars must be >= 1000")


class DeleterError(RuntimeError):
    """The model's endpoint failed; the message says what to do."""


class ModelDeleter:
    """Asks for one feature at a time, each of the kinds in turn. Use it with `async with`.

    `headers` are sent with each request, such as an authorization; they appear in no message.
    """

    def __init__(
        self,
        config: ModelDeleterConfig,
        *,
        headers: Mapping[str, str] | None = None,
        limits: FeatureLimits | None = None,
    ) -> None:
        self.name = f"model {config.model}"
        self._config, self._limits = config, limits or FeatureLimits()
        self._endpoint = ChatEndpoint(config, headers=headers)

    async def __aenter__(self) -> ModelDeleter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._endpoint.aclose()

    async def propose(
        self, repository: Repository, graph: CallGraph, *, kinds: Sequence[str], seed: int
    ) -> AsyncIterator[Proposal | Unusable]:
        """See `Deleter.propose`. `seed` fixes what is asked, not what the model says.

        Raises DeleterError where the endpoint fails, ValueError where no module fits a question.
        """
        package = PackageText(repository, graph)
        earlier: list[dict[str, object]] = []
        for number in range(self._config.max_questions):
            messages = package.messages(
                kinds[number % len(kinds)],
                limits=self._limits,
                order=random.Random(f"{seed}/{number}"),
                earlier=earlier[-_EARLIER:],
                outline_chars=self._config.outline_chars,
                source_chars=self._config.source_chars,
            )
            answer = await self._ask(messages)
            name, symbols = f"answer-{number + 1}", list[str]()
            try:
                deletion = read_deletion(answer)
                name = deletion.name
                symbols = [symbol[:100] for symbol in deletion.symbols[:20]]
                proposal = proposal_of(deletion, graph, package.files, kinds, self._limits)
            except RejectedError as error:
                earlier.append({"symbols": symbols, "not used": str(error)[:300]})
                yield Unusable(name=name, error=error)
                continue
            earlier.append({"symbols": symbols})
            yield proposal

    async def _ask(self, messages: Sequence[Mapping[str, str]]) -> ChatAnswer:
        config = self._config
        for attempt in range(1, config.attempts + 1):
            try:
                return await self._endpoint.ask(
                    messages, temperature=config.temperature, max_tokens=config.max_answer_tokens
                )
            except ChatError as error:
                passing = error.status in _PASSING or error.status >= 500
                if not passing or attempt == config.attempts:
                    words = f"model {config.model}: {error}; {_remedy(error.status)}"
                    raise DeleterError(words) from error
            await asyncio.sleep(config.retry_wait_s * 2 ** (attempt - 1))
        raise AssertionError("attempts >= 1")


def _remedy(status: int) -> str:
    if status in (401, 403):
        return f"set {API_KEY} to a key that the endpoint accepts"
    if status in _PASSING or status >= 500:
        return "check that it runs at this address, then start again"
    return "check the address (it ends in /v1 mostly), the model's name and its context length"


@contextlib.asynccontextmanager
async def open_deleter(name: str, *, url: str = "", model: str = "") -> AsyncIterator[Deleter]:
    """The deleter `static`, or `model` with its endpoint; the key comes from `API_KEY`.

    Raises ValueError for another name, or for an address or model that is missing or too much.
    """
    if name == "static":
        if url or model:
            raise ValueError("model-url and model are for --deleter model")
        yield StaticDeleter()
        return
    if name != "model":
        raise ValueError(f"deleter is {name!r}; choose static or model")
    if not url or not model:
        raise ValueError("deleter model needs --model-url, such as http://host/v1, and --model")
    key = os.environ.get(API_KEY, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError(f"{API_KEY} holds blanks or characters that no key has")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with ModelDeleter(ModelDeleterConfig(url=url, model=model), headers=headers) as deleter:
        yield deleter


# Answers ----------------------------------------------------------------------------------------


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """Either `old` and `new`, or `content`."""

    path: str
    old: str | msgspec.UnsetType = msgspec.UNSET
    new: str | msgspec.UnsetType = msgspec.UNSET
    content: str | None | msgspec.UnsetType = msgspec.UNSET


class Deletion(msgspec.Struct, forbid_unknown_fields=True):
    """A model's answer."""

    name: str
    symbols: list[str]
    edits: list[Edit]


def read_deletion(answer: ChatAnswer) -> Deletion:
    """The one JSON object of an answer, and nothing else. Raises RejectedError("bad_proposal")."""
    if answer.finish_reason == "length":
        raise RejectedError("bad_proposal", "the answer was cut off: raise max_answer_tokens")
    try:
        deletion = msgspec.json.decode(answer.text.strip().encode(), type=Deletion)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RejectedError("bad_proposal", f"not the JSON asked for: {error}") from error
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,59}", deletion.name):
        raise RejectedError("bad_proposal", f"the name {deletion.name!a:.80} is no short name")
    return deletion


def proposal_of(
    deletion: Deletion,
    graph: CallGraph,
    files: Mapping[str, str],
    kinds: Sequence[str],
    limits: FeatureLimits,
) -> Proposal:
    """The deletion with its files' new contents. `files`: path -> text, of what may change.

    Raises RejectedError where edits do not apply exactly, take away other definitions than the
    answer says, change functions that stay or leave them calling what is gone, or are of another
    kind or size than was asked for.
    """
    edits = _apply(deletion.edits, files)
    modules = frozenset(
        name for name, module in graph.modules.items() if edits.get(module.path, b"") is None
    )
    try:
        gone = symbols_gone(graph, edits)
        _check_named(deletion.symbols, graph, gone, modules)
        _check_rest(graph, edits, gone)
    except (RecursionError, MemoryError) as error:  # what Python's parser says of deep nesting
        raise RejectedError("broken_syntax", "an edited file is nested too deep") from error
    try:
        feature = feature_of(graph, deletion.name, gone, modules, limits)
    except NotDeletableError as error:
        raise RejectedError(error.reason, str(error)) from error
    if feature.kind not in kinds:
        raise RejectedError("bad_proposal", f"of the kind {feature.kind}, not {', '.join(kinds)}")
    return Proposal(name=feature.id, kind=feature.kind, edits=edits, fan_in=feature.fan_in)


def _apply(edits: Sequence[Edit], files: Mapping[str, str]) -> dict[str, bytes | None]:
    after: dict[str, str | None] = {}
    for edit in edits:
        place = f"{edit.path!a:.120}"
        if edit.path not in files:
            raise RejectedError("bad_proposal", f"{place} is no file of the package's own code")
        text = after.get(edit.path, files[edit.path])
        if edit.content is not msgspec.UNSET:
            if edit.old is not msgspec.UNSET or edit.new is not msgspec.UNSET:
                raise RejectedError("bad_proposal", f"{place}: an edit has content, or old and new")
            after[edit.path] = edit.content
            continue
        if not isinstance(edit.old, str) or not isinstance(edit.new, str) or not edit.old:
            raise RejectedError("bad_proposal", f"{place}: an edit needs old and new, or content")
        found = (text or "").count(edit.old)
        if found != 1:
            raise RejectedError("bad_proposal", f"{place}: old occurs {found} times, not once")
        after[edit.path] = (text or "").replace(edit.old, edit.new)
    changed = {path: text for path, text in after.items() if text != files[path]}
    if not changed:
        raise RejectedError("bad_proposal", "the edits change nothing")
    return {path: None if text is None else text.encode() for path, text in changed.items()}


def _check_named(names: Sequence[str], graph: CallGraph, gone: Set[str], modules: Set[str]) -> None:
    """RejectedError unless `names` are exactly what is gone."""
    named = {id for name in names for id in _ids_of(name, graph)}
    named = {id for id in named if graph.symbols[id].owner_class not in named}
    whole = {id for id in gone if graph.symbols[id].module in modules}
    if kept := sorted(named - gone):
        raise RejectedError("incomplete", f"{kept[0]} stays, or goes with its class")
    if unnamed := sorted(gone - named - whole):
        raise RejectedError("incomplete", f"{unnamed[0]} goes and is not named")
    if not gone:
        raise RejectedError("incomplete", "no definition goes")


def _ids_of(name: str, graph: CallGraph) -> Set[str]:
    """What a dotted name means, through re-exports; a module: all that it defines."""
    if name in graph.modules:
        return {id for id, symbol in graph.symbols.items() if symbol.module == name}
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module, qualname = ".".join(parts[:cut]), parts[cut:]
        found = graph.resolve(module, qualname[0])
        if found in graph.symbols and ".".join([found, *qualname[1:]]) in graph.symbols:
            return {".".join([found, *qualname[1:]])}
    raise RejectedError("bad_proposal", f"{name!a:.120} is no definition of the package")


def _check_rest(graph: CallGraph, edits: Mapping[str, bytes | None], gone: Set[str]) -> None:
    """RejectedError where a definition that stays is changed, or a function uses what is gone.

    The task's statement speaks of what is gone alone, so nothing else may need repair. A variable
    such as a table may lose its entries.
    """
    all_gone = {id for id, symbol in graph.symbols.items() if {id, symbol.owner_class} & gone}
    for id, symbol in graph.symbols.items():
        used = sorted(graph.uses[id] & all_gone)
        stays = id not in all_gone and symbol.kind in (Kind.FUNCTION, Kind.METHOD)
        if stays and used:
            raise RejectedError("dangling_name", f"{id} uses {used[0]}")
    for module in graph.modules.values():
        source = edits.get(module.path)
        if source is None:
            continue
        before, after = (_texts(module, tree) for tree in (module.tree, ast.parse(source)))
        for id in before.keys() - all_gone:
            if before[id] != after.get(id) and not graph.uses[id] & all_gone:
                raise RejectedError("incomplete", f"{id} is changed and does not go")


def _texts(module: Module, tree: ast.Module) -> dict[str, list[str]]:
    """Symbol id -> its definitions, several for an overloaded function; classes without methods."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        for symbol in symbols_of(module.name, module.path, node):
            part: ast.AST = symbol.node
            if isinstance(part, ast.ClassDef):
                body = [inner for inner in part.body if not isinstance(inner, Function | ast.Pass)]
                part = ast.ClassDef(
                    name=part.name,
                    bases=part.bases,
                    keywords=part.keywords,
                    decorator_list=part.decorator_list,
                    body=body,
                )
            found.setdefault(symbol.id, []).append(ast.dump(part))
    return found
