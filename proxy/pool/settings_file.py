"""The one loader of settings: a TOML file into a `msgspec.Struct`, for proxy, harness and trainer.

A setting is a field with a default, a type (`Literal` for choices, `Count` and its neighbours for ranges) and a
docstring; rules between fields stand in `__post_init__` and raise UserError. Left out: which settings there are.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.input_files import TOML_BYTES, parse_toml, read_text, shortened

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Positive
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
FilePath = Annotated[str, msgspec.Meta(description="a path, relative to the file that names it; or a URL")]

PLAIN = {
    "Object contains unknown field": "unknown key",
    "Object missing required field": "missing key",
    "Expected": "expected",
    "`object`": "an object",
}
"""What msgspec says -> what a user's file calls it."""
S = TypeVar("S", bound=msgspec.Struct)


def load_settings(path: Path, kind: type[S], overrides: Sequence[str] = ()) -> S:
    """Read a settings file and check it; UserError names the key, its value and what is allowed.

    Overrides are `section.key=value`, applied in order. Relative paths are resolved against the file's directory.
    """
    table = read_table(path)
    for override in overrides:
        apply_override(table, override)
    return checked(with_absolute_paths(table, kind, path.parent), kind, str(path))


def read_table(path: Path) -> dict[str, Any]:
    """The content of a TOML file; UserError when it cannot be read."""
    return parse_toml(read_text(path, TOML_BYTES), f"the file {path}")


def checked(table: Mapping[str, Any], kind: type[S], where: str, *, strict: bool = True) -> S:
    """The settings that a table holds; UserError for an unknown key or a value that is not allowed.

    `where` names the table's source in the message. `strict=False` also takes numbers that are written as strings.
    """
    try:
        return msgspec.convert(table, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_fault(error, table, kind)}") from error


def without_dropped_keys(table: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Settings that an earlier version stored, without the keys that no longer exist. Never used for a user's file."""
    types, kept = _types(kind), {}
    for key, value in table.items():
        if key in types:
            section = _section(types[key])
            kept[key] = without_dropped_keys(value, section) if section and isinstance(value, dict) else value
    return kept


def with_absolute_paths(table: Mapping[str, Any], kind: type[msgspec.Struct], base: Path) -> dict[str, Any]:
    """The table with every path (a value of type `FilePath`, or its default) made absolute.

    URLs and empty values stay as they are.
    """
    types, resolved = _types(kind), dict(table)
    for field in msgspec.structs.fields(kind):
        value, hint = table.get(field.name, field.default), types[field.name]
        section = _section(hint)
        if section and isinstance(value, dict):
            resolved[field.name] = with_absolute_paths(value, section, base)
        elif _holds_paths(hint) and isinstance(value, str | list):
            paths = [absolute(item, base) for item in value] if isinstance(value, list) else absolute(value, base)
            resolved[field.name] = paths
    return resolved


def absolute(path: Any, base: Path) -> Any:
    """A path seen from anywhere. What is empty, has a scheme or is not text is returned as it is."""
    return str((base / path).absolute()) if isinstance(path, str) and path and "://" not in path else path


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set what `section.key=value` says in a table; UserError where that goes through a value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(f"--set {override} has no value; write --set section.key=value")
    try:
        value = parse_toml(f"value = {text}", "")["value"]
    except UserError:
        value = text  # a bare word is a string, so that a shell needs no second pair of quotes
    *sections, key = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override} goes through {section}, which is not a section; name a section")
    table[key] = value


def demand(holds: bool, sentence: str) -> None:
    """UserError with the sentence (the value, the rule, the way out) unless the rule holds."""
    if not holds:
        raise UserError(sentence)


def _fault(error: msgspec.ValidationError, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """What is wrong, in the words of the file: the key, its value, the rule and the keys or choices there are."""
    rule, _, place = str(error).partition(" - at ")
    place = place.removeprefix("`key` in ").strip("`$")
    value: Any = table
    hint: Any = kind
    section: Any = kind
    for name, index in re.findall(r"([\w-]+)|\[(\d+)\]", place):
        value = value[int(index)] if index else value[name]
        hint = hint if index else _types(section).get(name)
        section = _section(hint) or section
    key = place.strip(".")
    for words, plain in PLAIN.items():
        rule = rule.replace(words, plain)
    if rule.startswith("Invalid enum value "):
        return f"{key} = {rule.removeprefix('Invalid enum value ')} is unknown; choose from {', '.join(_choices(hint))}"
    if isinstance(value, dict) or not key:
        return f"{key}{key and ': '}{rule}; correct it (keys there: {', '.join(section.__struct_fields__)})"
    return f"{key} = {shortened(repr(value))}: {rule}; correct it"


def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _section(hint: Any) -> type[msgspec.Struct] | None:
    """The struct in a type such as `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((section for inner in get_args(hint) if (section := _section(inner))), None)


def _holds_paths(hint: Any) -> bool:
    return hint == FilePath or any(_holds_paths(inner) for inner in get_args(hint))


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [choice for inner in get_args(hint) for choice in _choices(inner)]
