"""Statements of every commit, given to SQLite's driver itself: SQLAlchemy takes several times as long as SQLite does.

SQLAlchemy still writes their text, once, and says how each value is converted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ClauseElement, Connection
from sqlalchemy.sql.compiler import SQLCompiler

_Convert = Callable[[Any], Any] | None


class SqliteStatement:
    """A statement for SQLite. `names`: of its values; every run gives all of them."""

    def __init__(self, statement: ClauseElement, names: Iterable[str]):
        self._statement = statement
        self._names = list(names)
        self._written: tuple[str, list[tuple[str, _Convert]]] | None = None

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run it in the transaction of a connection and return its rows. Its errors are those of the driver."""
        text, places = self._written = self._written or self._write(connection)
        driver = connection.connection.driver_connection
        assert driver is not None, "a connection in a transaction has its driver's"
        given = [values[name] if convert is None else convert(values[name]) for name, convert in places]
        return list(driver.execute(text, given))

    def _write(self, connection: Connection) -> tuple[str, list[tuple[str, _Convert]]]:
        """The text with question marks, and for each of them the name of its value and how that is converted."""
        dialect = connection.dialect
        compiled = self._statement.compile(dialect=dialect, column_keys=self._names)
        assert isinstance(compiled, SQLCompiler) and compiled.positiontup is not None, "SQLite's values have places"
        types = {name: compiled.binds[name].type for name in compiled.positiontup}
        converts = {name: type_.dialect_impl(dialect).bind_processor(dialect) for name, type_ in types.items()}
        return str(compiled), [(name, converts[name]) for name in compiled.positiontup]
