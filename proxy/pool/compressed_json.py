"""A column type for JSON that is compressed in SQLite, where an answer's text would be a quarter of its row.

PostgreSQL compresses long values by itself. Short values, and rows written before compression, are stored as text. SQL
cannot query inside such a column.
"""

import zlib
from typing import Any

import msgspec
from sqlalchemy import JSON, ColumnElement, Text, cast, type_coerce
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

LEVEL = 1
"""The level of zlib. Higher ones take twice the time and save a twentieth more."""


class _Unchanged(UserDefinedType[Any]):
    """A column of type JSON whose values pass to and from the driver unchanged."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"


class CompressedJson(TypeDecorator[Any]):
    """A JSON value, compressed in SQLite where that makes it shorter."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(_Unchanged() if dialect.name == "sqlite" else JSON())

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        text = msgspec.json.encode(value)  # it refuses lone surrogates: a reply is stored as it was, or not at all
        if dialect.name != "sqlite":
            return msgspec.Raw(text)
        compressed = zlib.compress(text, LEVEL)
        return compressed if len(compressed) < len(text) else text.decode()

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return msgspec.json.decode(_decompressed(value)) if dialect.name == "sqlite" else value


class _JsonText(CompressedJson):
    """The value as JSON text; "" where it cannot be decompressed."""

    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return _decompressed(value)
        except zlib.error:
            return ""


def as_text(column: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    """Return a column as JSON text, also where it is damaged."""
    return type_coerce(column, _JsonText()) if dialect == "sqlite" else cast(column, Text)


def _decompressed(stored: bytes | str) -> bytes | str:
    return zlib.decompress(stored) if isinstance(stored, bytes) else stored
