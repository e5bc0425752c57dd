"""Config: one frozen tree of settings that goes to JSON and comes back equal, or says why not.

Nothing here imports torch, so that a command line answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

_ABSENT = "(absent)"


class Config:
    """Base of configuration dataclasses: `@dataclasses.dataclass(frozen=True, kw_only=True)`.

    A field's type is one of: bool, int, float, str, Path, None, an Enum, a Literal, another Config,
    Any, and Optionals, unions, lists, tuples and string- or int-keyed dicts of these.
    A union of several Configs is told apart by its field names, so no two members may have the
    same set of fields unless a Literal field tells them apart.
    """

    def to_dict(self) -> dict[str, Any]:
        """This tree as plain JSON values: tuples become lists, an Enum its value, a Path a string.

        Infinity becomes "inf" or "-inf", which strict JSON can hold; ValueError for a NaN.
        """
        return {name: _encode(getattr(self, name), name) for name in _init_fields(type(self))}

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "") -> Self:
        """The inverse of `to_dict`; fields that are missing take their defaults.

        `where` is the dotted path of `data` in a larger tree and leads every message. Raises
        ValueError for an unknown field, a value of the wrong type, a missing required field, and
        whatever the class's own `__post_init__` refuses.
        """
        if not isinstance(data, dict):  # what users see is ValueError, whatever is wrong
            got = _describe(data)
            raise ValueError(f"{where or cls.__name__}: expected an object, got {got}")
        fields, hints = _init_fields(cls), field_types(cls)
        for name in data:
            if name not in fields:
                hint = nearest_name_hint(str(name), fields)
                raise ValueError(
                    f"unknown field {_join(where, str(name))!r} of {cls.__name__}; {hint}"
                )
        for name, field in fields.items():
            if name not in data and _is_required(field):
                raise ValueError(
                    f"missing required field {_join(where, name)!r} of {cls.__name__} "
                    f"(expected {_type_name(hints[name])})"
                )
        values = {n: _decode(value, hints[n], _join(where, n)) for n, value in data.items()}
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(with_place(str(error), where)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_dict` to `path` as indented JSON, all or nothing; makes missing folders."""
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The config that `save` wrote; ValueError naming the file for anything else."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read config {path}: {error.strerror}") from error
        except ValueError as error:  # JSON and UTF-8 decoding errors are both ValueErrors
            raise ValueError(f"config {path} is not complete JSON: {error}") from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"config {path}: {error}") from error

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON; equal configs agree."""
        canonical = json.dumps(
            _integral_floats_as_ints(self.to_dict()), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def diff(self, other: Config) -> list[str]:
        """Lines `dotted.path: old -> new` for each setting of `other` that differs from this."""
        old, new = _flatten(self.to_dict()), _flatten(other.to_dict())
        return [
            f"{path}: {_shown(old, path)} -> {_shown(new, path)}"
            for path in dict.fromkeys([*old, *new])
            if _shown(old, path) != _shown(new, path)
        ]


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """`did you mean x?` for the closest of `known`, or the list of them when none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return "known: " + (", ".join(known) or "none")


def with_place(message: str, where: str) -> str:
    """`where: message`, unless the message names its field as `section.field` by itself."""
    section = where.rpartition(".")[2]
    named = not where or re.search(rf"\b{re.escape(section)}\.\w", message)
    return message if named else f"{where}: {message}"


def _init_fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} derives from Config but is no dataclass"
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The annotated type, resolved, of each field that the constructor takes."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _init_fields(cls)}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, Config):
        names = _init_fields(type(value))
        return {name: _encode(getattr(value, name), _join(where, name)) for name in names}
    if isinstance(value, enum.Enum):
        return _encode(value.value, where)
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise ValueError(f"{where} is NaN, which equals nothing; use None or a number")
        return "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): _encode(item, _join(where, str(key))) for key, item in value.items()}
    raise AssertionError(f"{where}: a Config cannot hold a {type(value).__name__}")


def _decode(value: Any, hint: Any, where: str) -> Any:
    """`value` from JSON as the annotated type `hint`; ValueError naming `where` if it is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(value, arguments, where)
    if origin is Literal:
        for choice in arguments:
            if type(choice) is type(value) and choice == value:
                return choice
        raise _wrong_type(value, hint, where)
    base = origin or hint
    if base in (list, tuple):
        return _decode_sequence(value, base, arguments, hint, where)
    if base is dict:
        return _decode_mapping(value, arguments, hint, where)
    assert isinstance(hint, type), f"{where}: a Config field cannot have the type {hint}"
    return _decode_scalar(value, hint, where)


def _decode_scalar(value: Any, hint: type, where: str) -> Any:
    if issubclass(hint, Config):
        return hint.from_dict(value, where=where)
    if issubclass(hint, enum.Enum):
        for member in hint:
            if member.value == value:
                return member
        raise _wrong_type(value, hint, where)
    if hint is float:
        if isinstance(value, str) and value in ("inf", "-inf"):
            return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _wrong_type(value, hint, where)
    if hint is Path:
        if isinstance(value, str):
            return Path(value)
        raise _wrong_type(value, hint, where)
    supported = (bool, int, str, types.NoneType)
    assert hint in supported, f"{where}: a Config field cannot have the type {hint}"
    # `type is`, not isinstance: True is an int to Python but not a count to anyone
    if type(value) is not hint:
        raise _wrong_type(value, hint, where)
    return value


def _decode_sequence(
    value: Any, base: type, arguments: tuple[Any, ...], hint: Any, where: str
) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, hint, where)
    if not arguments:
        item_hints = [Any] * len(value)
    elif base is list or arguments[-1] is Ellipsis:
        item_hints = [arguments[0]] * len(value)
    else:
        item_hints = list(arguments)
    if len(item_hints) != len(value):
        raise ValueError(f"{where}: expected {len(item_hints)} values, got {len(value)}")
    pairs = zip(value, item_hints, strict=True)
    return base(_decode(item, h, f"{where}[{i}]") for i, (item, h) in enumerate(pairs))


def _decode_mapping(value: Any, arguments: tuple[Any, ...], hint: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type(value, hint, where)
    key_hint, item_hint = arguments or (str, Any)
    assert key_hint in (str, int), f"{where}: keys of a Config dict are str or int"
    decoded = {}
    for key, item in value.items():
        if key_hint is int and isinstance(key, str) and key.lstrip("-").isdecimal():
            key = int(key)  # JSON has only string keys
        decoded[_decode(key, key_hint, f"{where} key")] = _decode(
            item, item_hint, _join(where, str(key))
        )
    return decoded


def _decode_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in members:
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if len(members) == 1:
        return _decode(value, members[0], where)
    configs = [m for m in members if isinstance(m, type) and issubclass(m, Config)]
    if isinstance(value, dict) and configs:
        return _decode_config_union(value, configs, where)
    # the value's own type first, so that 1 stays an int in `float | int`
    for member in sorted(members, key=lambda member: member is not type(value)):
        try:
            return _decode(value, member, where)
        except ValueError:
            continue  # not this member; if it is none of them, that is the error below
    options = " or ".join(_type_name(member) for member in members)
    raise ValueError(f"{where}: expected {options}, got {_describe(value)}")


def _decode_config_union(value: dict[str, Any], configs: list[type[Config]], where: str) -> Config:
    matches = [config for config in configs if set(_init_fields(config)) == set(value)]
    if len(matches) == 1:
        return matches[0].from_dict(value, where=where)
    options = "; ".join(f"{m.__name__}({', '.join(_init_fields(m))})" for m in matches or configs)
    if not matches:
        raise ValueError(f"{where}: fields must be exactly those of one of {options}")
    decoded: list[Config] = []
    for config in matches:  # same names: the values (a Literal field) have to tell them apart
        try:
            decoded.append(config.from_dict(value, where=where))
        except ValueError:
            continue
    if len(decoded) != 1:
        raise ValueError(
            f"{where}: {len(decoded)} of {options} accept these values, need exactly 1"
        )
    return decoded[0]


def _wrong_type(value: Any, hint: Any, where: str) -> ValueError:
    return ValueError(f"{where}: expected {_type_name(hint)}, got {_describe(value)}")


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(member) for member in arguments)
    if hint is types.NoneType:
        return "None"
    if isinstance(hint, type) and origin is None:
        if issubclass(hint, enum.Enum):
            return "one of " + ", ".join(repr(member.value) for member in hint)
        return hint.__name__
    return str(hint).replace("typing.", "")


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def _integral_floats_as_ints(value: Any) -> Any:
    """1.0 as 1, because a float field that was given the int 1 makes an equal config."""
    if isinstance(value, dict):
        return {key: _integral_floats_as_ints(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integral_floats_as_ints(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flatten(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = _join(where, name)
        if isinstance(value, dict) and value:
            flat |= _flatten(value, path)
        else:
            flat[path] = value
    return flat


def _shown(flat: dict[str, Any], path: str) -> str:
    return json.dumps(_integral_floats_as_ints(flat[path])) if path in flat else _ABSENT
