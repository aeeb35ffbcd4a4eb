"""The rule for every field of a request: it is served, or ignored and named in the answer's header, or refused.

The types of a dialect's request list the fields that it reads. What they do not list is ignored, and named.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from proxy.call import CallError

_Read = TypeVar("_Read", bound=msgspec.Struct)
_UNDERSCORE = re.compile(r"_([a-z0-9])")


@dataclass(frozen=True)
class _Shape:
    """The fields of an object that are read, and the shape of each of them that holds an object."""

    fields: frozenset[str]
    inner: dict[str, "_Shape"] = field(default_factory=dict)


class RequestReader(Generic[_Read]):
    """Reads the bodies of one kind of request. `snake_case`: names may be written so instead of in camel case."""

    def __init__(self, request: type[_Read], what: str, snake_case: bool = False):
        self._request = request
        # msgspec 0.22.0 looks at a type when it is first used. If two threads use it then, the process may crash.
        msgspec.json.Decoder(request)
        self._what = what
        self._snake_case = snake_case
        self._shape = _shape(request, {})

    def read(self, body: bytes) -> tuple[_Read, tuple[str, ...]]:
        """The request, and the names of its fields that nothing reads; CallError 400 says what is wrong with it."""
        try:
            values = msgspec.json.decode(body)
            if self._snake_case:
                _to_camel_case(values, self._shape)
            request = msgspec.convert(values, self._request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CallError(400, "invalid_request", f"the body is not {self._what}: {error}") from error
        return request, tuple(dict.fromkeys(_unread([values], self._shape, "")))


def _shape(request: type[msgspec.Struct], known: dict[type, _Shape]) -> _Shape:
    if request not in known:
        hints = get_type_hints(request)
        shape = known[request] = _Shape(frozenset(hints))  # known before its fields are, which may be of this type
        for name, hint in hints.items():
            for struct in _structs(hint):
                shape.inner[name] = _shape(struct, known)
    return known[request]


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """The types of objects in a type such as `str | list[Part] | None`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)


def _unread(values: list[Any], shape: _Shape, place: str) -> list[str]:
    """The names of fields of these objects that are set and not read, with the place of each."""
    names = []
    for value in values:  # every object of every request: whole sets of keys are compared
        if isinstance(value, list):
            names += _unread(value, shape, place)
        elif isinstance(value, dict):
            for name in shape.inner if value.keys() <= shape.fields else value:
                nested, inner = value.get(name), shape.inner.get(name)
                if name not in shape.fields and nested is not None:
                    names.append(place + name)
                elif inner is not None and isinstance(nested, list):
                    names += _unread(nested, inner, f"{place}{name}[].")
                elif inner is not None and isinstance(nested, dict):
                    names += _unread([nested], inner, f"{place}{name}.")
    return names


def _to_camel_case(values: Any, shape: _Shape) -> None:
    """Rename the fields that are written in snake case. What a field holds keeps its names if it has no shape."""
    if isinstance(values, list):
        for value in values:
            _to_camel_case(value, shape)
    elif isinstance(values, dict):
        for name in [name for name in values if "_" in name]:
            if (camel := camel_case(name)) in shape.fields:
                values.setdefault(camel, values.pop(name))
        for name, inner in shape.inner.items():
            _to_camel_case(values.get(name), inner)


def camel_case(name: str) -> str:
    """A name like `max_output_tokens` as `maxOutputTokens`."""
    return _UNDERSCORE.sub(lambda letter: letter[1].upper(), name)
