"""JSON of any length in a column: compressed in SQLite, where an answer's text would be a quarter of its row.

PostgreSQL compresses long values by itself. What is short, and rows of before, stand there as text. Left out: questions
about what is inside, which SQL cannot ask.
"""

import zlib
from typing import Any

import msgspec
from sqlalchemy import JSON, ColumnElement, Text, cast, type_coerce
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

LEVEL = 1
"""Of zlib: higher ones take twice the time and save a twentieth more."""


class _AsIs(UserDefinedType[Any]):
    """What the driver takes and gives."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"


class Packed(TypeDecorator[Any]):
    """A JSON value."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(_AsIs() if dialect.name == "sqlite" else JSON())

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return _packed(msgspec.json.encode(value)) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return msgspec.json.decode(_unpacked(value)) if dialect.name == "sqlite" else value


class _Unread(Packed):
    """The same as JSON text, empty where it cannot be unpacked."""

    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return _unpacked(value)
        except zlib.error:
            return ""


def as_text(column: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    """A packed column as JSON text, broken or not."""
    return type_coerce(column, _Unread()) if dialect == "sqlite" else cast(column, Text)


def _packed(text: bytes) -> bytes | str:
    packed = zlib.compress(text, LEVEL)
    return packed if len(packed) < len(text) else text.decode()


def _unpacked(stored: bytes | str) -> bytes | str:
    return zlib.decompress(stored) if isinstance(stored, bytes) else stored
