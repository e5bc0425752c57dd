"""The command line of every entry script: a recipe name, then dotted overrides.

`script.py RECIPE [--section.field value ...]` or `script.py --config RUN/config.json [...]`.
Nothing here imports torch, and tyro only when a command line is parsed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megacomposer.config.base import Config, field_types, nearest_name_hint, with_place

C = TypeVar("C", bound=Config)

# tyro's box: corners, vertical, horizontal, and the padding inside
_FRAME = "\u256d\u256e\u2570\u256f\u2502\u2500 "
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parse_command_line(
    recipes: dict[str, Callable[[], C]], argv: list[str] | None = None, *, description: str
) -> C:
    """The config that `argv` (default: the process's arguments) asks for.

    `recipes` maps a name to a function of no arguments that returns a complete config; the first
    line of its docstring is its help. Names and options may be spelled with `-` or `_`. A bool is
    set by `--a.flag`, `--a.no-flag`, `--a.flag True` or `--a.flag False`; an Optional is unset by
    `None`. A field that may hold several kinds of Config keeps the kind its recipe chose.

    Exits the process instead of returning: with code 0 after `--help`, and with code 2 after one
    line `error: ...` on stderr for anything that is wrong, or after the list of recipes when there
    are no arguments.
    """
    assert recipes, "a command line needs at least one recipe"
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = Path(sys.argv[0]).name
    overview = _overview(recipes, program, description)
    if not arguments:
        print(overview, file=sys.stderr)
        sys.exit(2)
    if arguments in (["-h"], ["--help"]):
        print(overview)
        sys.exit(0)
    try:
        base, label, overrides = _choose_base(recipes, arguments)
    except ValueError as error:
        _fail(str(error))
    return _apply_overrides(base, overrides, prog=f"{program} {label}", description=description)


def _overview(recipes: dict[str, Callable[[], C]], program: str, description: str) -> str:
    width = max(len(name) for name in recipes)
    lines = [
        f"usage: {program} RECIPE [--section.field value ...]",
        f"       {program} --config FILE.json [--section.field value ...]",
        "",
        description,
        "",
        "recipes:",
    ]
    for name, recipe in recipes.items():
        summary = (recipe.__doc__ or "").strip().partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}".rstrip())
    lines += ["", f"`{program} RECIPE --help` lists the options and their values in that recipe."]
    return "\n".join(lines)


def _choose_base(
    recipes: dict[str, Callable[[], C]], arguments: list[str]
) -> tuple[C, str, list[str]]:
    """The config to start from, how the user named it, and the arguments that are left."""
    first = arguments[0]
    if first == "--config" or first.startswith("--config="):
        _, equals, file = first.partition("=")
        rest = arguments[1:]
        if not equals:
            if not rest:
                raise ValueError("--config needs the path of a config.json")
            file, rest = rest[0], rest[1:]
        config_type = type(next(iter(recipes.values()))())
        return config_type.load(file), f"--config {file}", rest
    names = {name.replace("-", "_"): name for name in recipes}
    if first.startswith("-"):
        known = ", ".join(recipes)
        raise ValueError(
            f"the first argument is a recipe or --config, got {first!r}; known: {known}"
        )
    name = names.get(first.replace("-", "_"))
    if name is None:
        hint = nearest_name_hint(first, recipes)
        raise ValueError(f"unknown recipe {first!r}; {hint} (recipes: {', '.join(recipes)})")
    return recipes[name](), name, arguments[1:]


def _apply_overrides(base: C, overrides: list[str], *, prog: str, description: str) -> C:
    import tyro

    options = dict(_options(base, ""))
    arguments = _bools_as_flags(overrides, options)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            # A field that may hold several Configs would become a subcommand, whose options must
            # come last and in order; AvoidSubcommands keeps every option a plain dotted path.
            config, unknown = tyro.cli(
                type(base),
                prog=prog,
                description=description,
                default=base,
                args=arguments,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as exit_request:
        if exit_request.code in (0, None):
            raise
        _fail(_one_line(printed.getvalue(), exit_request))
    if unknown:
        _fail(_unknown_argument(unknown[0], base, options))
    return config


def _options(config: Config, where: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of the tree as (dotted path, annotated type)."""
    for name, hint in field_types(type(config)).items():
        path = f"{where}.{name}" if where else name
        value = getattr(config, name)
        if isinstance(value, Config):
            yield from _options(value, path)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Config):
            for index, item in enumerate(value):
                yield from _options(item, f"{path}.{index}")
        else:
            yield path, hint


def _bools_as_flags(overrides: list[str], options: dict[str, Any]) -> list[str]:
    """`--a.flag False` and `--a.flag=False` as `--a.no_flag`: tyro's own bools take no value."""
    flags: list[str] = []
    rest = list(overrides)
    while rest:
        token = rest.pop(0)
        option, _, value = token.partition("=")
        path = _field_path(option)
        if option.startswith("--") and options.get(path) is bool:
            if "=" not in token and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            if value.lower() == "false":
                section, dot, name = path.rpartition(".")
                token = f"--{section}{dot}no_{name}"
            elif value.lower() == "true":
                token = f"--{path}"
            elif "=" in token:
                _fail(f"--{path}: expected True or False, got {value!r}")
        flags.append(token)
    return flags


def _field_path(option: str) -> str:
    return option.partition("=")[0].lstrip("-").replace("-", "_")


def _unknown_argument(token: str, base: Config, options: dict[str, Any]) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; an override is --section.field value"
    path = _field_path(token)
    section: Any = base
    for depth, name in enumerate(path.split(".")[:-1], start=1):
        section = getattr(section, name, section)
        if section is None:
            where = ".".join(path.split(".")[:depth])
            return f"unknown option --{path}: {where} is None in this recipe"
    same_name = [f"--{option}" for option in options if option.endswith(f".{path}")]
    if same_name:
        return f"unknown option --{path}; did you mean {' or '.join(same_name[:3])}?"
    known = [f"--{option}" for option in options]
    return f"unknown option --{path}; {nearest_name_hint(f'--{path}', known)}"


def _one_line(printed: str, exit_request: SystemExit) -> str:
    """The message of the box that tyro drew, without its frame, title, help text and wrapping.

    Under a title are rows that end at a rule or a blank row. The frame is drawn with box characters
    or, where stdout is not UTF-8, with dashes and spaces.
    """
    rows = [row.strip(_FRAME) for row in _ANSI.sub("", printed).splitlines()]
    texts = ["" if set(row) <= {"-"} else row for row in rows]
    _title, *texts = itertools.dropwhile(lambda text: not text, texts)
    texts = list(itertools.dropwhile(lambda text: not text, texts))
    message = " ".join(itertools.takewhile(bool, texts)).removeprefix("Error parsing ")
    cause = exit_request.__context__
    while cause is not None and not isinstance(cause, ValueError):
        cause = cause.__context__
    if cause is None:
        return message
    # the original error has the text before wrapping, which cuts long words such as paths
    return with_place(str(cause), message.partition(": ")[0])


def _fail(message: str) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
