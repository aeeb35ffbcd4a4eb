"""Every field of a request as an SDK's own types declare it: a body that sets it, and the same one without it.

`cases` reads TypedDicts, as openai and anthropic have them; google_requests.py, beside it, reads pydantic's models.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import ReadOnly, get_type_hints, is_typeddict

SCALARS: dict[Any, Any] = {int: 2, float: 0.5, bool: True}
TEXTS = (str, object, Any)
MARKS = (Annotated, Required, NotRequired, ReadOnly)
UNIONS = (Union, types.UnionType)


@dataclass(frozen=True)
class FieldCase:
    """One field: where it stands, with the type of each object on the way, and two bodies."""

    name: str
    without: dict[str, Any]
    body: dict[str, Any]


@dataclass(frozen=True)
class _Variant:
    """One of the values that a field may have."""

    label: str
    value: Any
    kind: Any = None
    """The TypedDict of the object that is the value, or is in it."""
    around: Callable[[Any], Any] = lambda value: value
    """Makes the field's value of such an object."""


def cases(
    kind: Any, name: str, put: Callable[[Any], dict[str, Any]], within: tuple[Any, ...] = ()
) -> Iterator[FieldCase]:
    """The cases of all fields of a TypedDict and of what is in them. `put` makes the body around such an object."""
    least = _least(kind)
    for field, hint in get_type_hints(kind, include_extras=True).items():
        without = put({key: value for key, value in least.items() if key != field})
        for variant in _variants(hint, field):
            place = f"{name}.{field}{variant.label}".removeprefix(".")
            body = put({**least, field: variant.value})
            if variant.value not in (None, {}):
                yield FieldCase(place, without, body)
            if variant.kind is not None and variant.kind not in within:

                def inside(value: Any, field: str = field, variant: _Variant = variant) -> dict[str, Any]:
                    return put({**least, field: variant.around(value)})

                yield from cases(variant.kind, place, inside, (*within, variant.kind))


def _variants(hint: Any, field: str) -> Iterator[_Variant]:
    """The values that a field of this type may have. A text is the field's name, so that texts differ."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in MARKS:
        yield from _variants(inner[0], field)
    elif origin in UNIONS:
        for each in inner:
            yield from _variants(each, field)
    elif origin is Literal:
        yield _Variant("", inner[0])
    elif is_typeddict(hint):
        yield _Variant(_tag(hint), _least(hint), hint)
    elif origin is dict:
        yield _Variant("", {"key": next(_variants(inner[1], field)).value})
    elif len(inner) == 1:  # a list of any kind
        for each in _variants(inner[0], field):
            yield _Variant(f"[{each.label}]", [each.value], each.kind, partial(_in_list, each.around))
    elif hint in TEXTS:
        yield _Variant("", field)
    elif hint in SCALARS:
        yield _Variant("", SCALARS[hint])


def _in_list(around: Callable[[Any], Any], value: Any) -> list[Any]:
    return [around(value)]


def _least(kind: Any) -> dict[str, Any]:
    """An object with its required fields only."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {field: get_origin(hint) for field, hint in hints.items()}  # what the class knows misses quoted marks
    required = [
        f for f in hints if marks[f] is Required or (f in kind.__required_keys__ and marks[f] is not NotRequired)
    ]
    return {field: next(_variants(hints[field], field)).value for field in required}


def _tag(kind: Any) -> str:
    """What tells a type of object from others in its place: its `type` or `role`, else nothing."""
    hints = get_type_hints(kind)
    tags = [get_args(hints[name]) for name in ("type", "role") if name in hints and get_origin(hints[name]) is Literal]
    return f"<{tags[0][0]}>" if tags else ""
