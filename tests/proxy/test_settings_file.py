"""The loader that proxy, harness and trainer share: paths, overrides, and messages with value, rule and way out."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from proxy.pool.errors import UserError
from proxy.pool.settings_file import Count, FilePath, Positive, checked, load_settings, without_dropped_keys


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight: Positive = 1.0
    kind: Literal["a", "b"] = "a"
    kinds: tuple[Literal["x", "y"], ...] = ()
    shares: dict[Literal["q"], Count] = {}
    key: FilePath | None = None


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    files: FilePath | tuple[FilePath, ...] = ()
    pool: FilePath = "pool.db"
    steps: Annotated[int, msgspec.Meta(ge=0)] | None = None


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"inner": {"weight": 0}}, "f: inner.weight = 0: expected `float` > 0.0; correct it"),
        ({"inner": {"weight": float("nan")}}, "f: inner.weight = nan: expected `float` > 0.0; correct it"),
        ({"inner": {"kind": "c"}}, "f: inner.kind = 'c' is unknown; choose from a, b"),
        ({"inner": {"kinds": ["z"]}}, "f: inner.kinds[0] = 'z' is unknown; choose from x, y"),
        ({"inner": {"shares": {"u": 1}}}, "f: inner.shares = 'u' is unknown; choose from q"),
        ({"inner": 5}, "f: inner = 5: expected an object, got `int`; correct it"),
        ({"many": [{}, {"weight": -1}]}, "f: many[1].weight = -1: expected `float` > 0.0; correct it"),
        (
            {"many": [{"x": 1}]},
            "f: many[0]: unknown key `x`; correct it (keys there: weight, kind, kinds, shares, key)",
        ),
        ({"steps": -1}, "f: steps = -1: expected `int` >= 0; correct it"),
        ({"x": 1}, "f: unknown key `x`; correct it (keys there: inner, many, files, pool, steps)"),
    ],
)
def test_a_message_has_the_value_the_rule_and_the_way_out(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        checked(table, Outer, "f")
    assert str(refused.value) == sentence


def test_paths_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("files = ['a', '/b', 'http://c', '']\n[inner]\nkey = 'k'\n")
    settings = load_settings(tmp_path / "s.toml", Outer, ["inner.kind=b"])
    assert settings.files == (str(tmp_path / "a"), "/b", "http://c", "")
    assert (settings.inner.key, settings.pool, settings.inner.kind) == (
        str(tmp_path / "k"),
        str(tmp_path / "pool.db"),
        "b",
    )


def test_keys_that_went_are_dropped_from_stored_settings_only() -> None:
    stored = {"gone": 1, "inner": {"kind": "b", "gone": 2}}
    assert checked(without_dropped_keys(stored, Outer), Outer, "s") == Outer(inner=Inner(kind="b"))
    with pytest.raises(UserError, match="unknown key"):
        checked(stored, Outer, "s")
