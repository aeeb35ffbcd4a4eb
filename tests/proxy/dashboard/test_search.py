"""The index beside a pool: what it holds, how it grows, what is found with it, and that it can be lost."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from proxy.pool.browse.changes import marks
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.schema import attempts
from proxy.pool.search import build
from proxy.pool.search.build import Builder, progress
from proxy.pool.search.index import open_writer, place_of, reading
from proxy.pool.search.query import Wanted, matching, search
from tests.proxy.dashboard.conftest import Filled, Visit, Visitor
from tests.proxy.dashboard.make import Story, Work, story


def built(pool: Pool, file: Path) -> sqlite3.Connection:
    """The index of all that the pool holds."""
    index = open_writer(file)
    builder = Builder(pool, index)
    while builder.step():
        pass
    return index


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is new is indexed without waiting for what is older."""
    monkeypatch.setattr(build, "SETTLE_SECONDS", -5.0)


@pytest.fixture
def index(filled: Filled, tmp_path: Path, at_once: None) -> Iterator[sqlite3.Connection]:
    """The index of the filled pool."""
    pool = open_pool(filled.url, create=False, read_only=True)
    opened = built(pool, tmp_path / "index")
    yield opened
    opened.close()
    pool.close()


def found(index: sqlite3.Connection, **wanted: Any) -> list[int | None]:
    """The calls, or the rollouts, that a question finds."""
    return [hit.call if hit.call is not None else hit.rollout_id for hit in search(index, Wanted(**wanted)).hits]


def test_words_of_replies_calls_and_results_are_found(index: sqlite3.Connection, told: Story) -> None:
    assert found(index, words="sub-agent") == [told.calls[6]]
    assert found(index, words="document title owned") == [told.calls[4], told.calls[0]]
    assert found(index, words='"no rule to make target"') == told.calls[1:4][::-1]
    assert found(index, words="rul* target") == told.calls[1:4][::-1] and found(index, words="rul target") == []
    assert found(index, words="target rule", run_id=told.run_id + 1) == []
    assert found(index, words="make") == told.calls[:4][::-1]


def test_filters_hold_together(index: sqlite3.Connection, told: Story) -> None:
    looped, failed = told.rollouts
    assert found(index, event="retry_loop") == [looped] and found(index, event="undo_loop") == []
    assert found(index, event="retry_loop", most_reward=0.5) == []
    assert found(index, failure="verifier") == [failed] and failed in found(index, failure="any")
    assert failed in found(index, no_reward=True) and looped not in found(index, no_reward=True)
    assert found(index, least_calls=8) == [looped] and looped not in found(index, most_calls=7)
    assert looped in found(index, failure="none", least_reward=1.0, agent="scaffold", domain="agent", least_tokens=40)
    assert found(index, words="make", event="retry_loop", least_reward=1.0) == told.calls[:4][::-1]
    assert found(index, words="make", failure="verifier") == []


def test_the_index_goes_on_where_it_was_and_finds_what_is_new(
    database: str, pool: Pool, tmp_path: Path, at_once: None
) -> None:
    told = story(pool)
    before = marks(pool).completions
    index = built(pool, tmp_path / "index")
    assert progress(index).whole and progress(index).calls == before
    index.close()
    work = Work(pool, told.session)
    work.call({"content": "something entirely new"}, ordinal=1)
    index = built(pool, tmp_path / "index")
    assert found(index, words="entirely") == work.ids and progress(index).calls == before + 1
    assert found(index, event="retry_loop") == [told.rollouts[0]]
    index.close()


def test_the_index_is_not_called_whole_while_a_finished_group_waits(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = story(pool)
    monkeypatch.setattr(build, "SETTLE_SECONDS", 3600.0)
    index = built(pool, tmp_path / "index")
    assert found(index, event="retry_loop") == [] and not progress(index).outcomes_whole
    index.close()
    monkeypatch.setattr(build, "SETTLE_SECONDS", -5.0)
    index = built(pool, tmp_path / "index")
    assert found(index, event="retry_loop") == [told.rollouts[0]] and progress(index).outcomes_whole
    index.close()


def test_pages_of_hits_go_on_where_the_last_one_ended(
    pool: Pool, tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = story(pool)
    work = Work(pool, told.session)
    for number in range(70):
        work.call({"content": f"common {number}"}, after=None, ordinal=number + 1)
    index = built(pool, tmp_path / "index")
    seen, before = [], None
    while True:
        page = search(index, Wanted(words="common"), before)
        seen += [hit.call for hit in page.hits]
        before = page.before
        if before is None:
            break
    assert seen == work.ids[::-1]
    index.close()


def test_an_index_of_another_version_or_a_damaged_one_is_no_harm(tmp_path: Path, pool: Pool, at_once: None) -> None:
    story(pool)
    file = tmp_path / "index"
    index = built(pool, file)
    index.execute("update meta set value = 0 where name = 'version'")
    index.close()
    with reading(file) as known:
        assert known is None
    built(pool, file).close()
    with reading(file) as known:
        assert known is not None and progress(known).whole
    assert file.stat().st_mode & 0o077 == 0
    with reading(tmp_path / "none") as known:
        assert known is None
    for content in (b"no database", file.read_bytes()[:4096] + b"x" * 50_000):
        file.write_bytes(content)
        with reading(file) as known:
            assert known is None
        built(pool, file).close()
        with reading(file) as known:
            assert known is not None and progress(known).whole


@pytest.mark.parametrize(
    "words",
    ['"', '" OR "', "NEAR(a b)", "a AND NOT b", "reply:x", "(", "^a", "a\0b", "-", "*", "'; drop table words; --"],
)
def test_words_are_words_whatever_they_look_like(index: sqlite3.Connection, words: str) -> None:
    try:
        search(index, Wanted(words=words))
    except UserError as error:
        assert "has no word" in str(error)
    assert index.execute("select count(*) from calls").fetchone()[0] > 0


def test_every_word_is_quoted() -> None:
    assert matching('a b* "c d" OR') == '"a" AND "b"* AND "c d" AND "OR"'


def test_the_place_of_an_index_tells_no_password(tmp_path: Path) -> None:
    assert place_of(f"sqlite:///{tmp_path}/pool.db") == tmp_path / "pool.db.search"
    first = place_of("postgresql://me:secret@host/name")
    assert first == place_of("postgresql://me:other@host/name") != place_of("postgresql://me@host/other")


async def test_the_page_of_search_shows_what_the_pool_holds_now(
    visit: Visit, filled: Filled, told: Story, at_once: None
) -> None:
    visitor = await visit(filled.url)
    await whole(visitor)
    page = await visitor.ask("search", q="target rule")
    assert [hit["call"] for hit in page["hits"]] == told.calls[1:4][::-1]
    hit = page["hits"][0]
    assert (hit["word"], hit["where"], hit["run"], hit["reward"]) == ("target", "result", "train", 1.0)
    [loop] = (await visitor.ask("search", event="retry_loop", run="train"))["hits"]
    assert loop["rollout_id"] == told.rollouts[0] and loop["events"] == 1
    figures = (await visitor.ask("runs/train/behaviour"))["figures"]
    loops = next(each for each in figures["events"] if each["kind"] == "retry_loop")
    assert loops["rollouts"] == 1 and loops["reward"] == 1.0 and figures["failures"] == {"verifier": 1}
    for given in ({"q": "x" * 300}, {"least_reward": "nan"}, {"most_calls": "-1"}, {"q": "!!!"}):
        assert (await visitor.ask("search", 400, **given))["error"]
    assert (await visitor.ask("search", 404, run="none"))["error"]


async def whole(visitor: Visitor) -> None:
    """Wait until the index has all."""
    async with asyncio.timeout(60):
        while True:
            state = await visitor.ask("search/index")
            if state["progress"] and state["progress"]["whole"] and state["progress"]["outcomes_whole"]:
                return
            assert not state["trouble"]
            await asyncio.sleep(0.02)


async def test_an_index_that_cannot_be_written_is_said_and_the_rest_works(visit: Visit, filled: Filled) -> None:
    visitor = await visit(filled.url, index=Path("/proc/nowhere/index"))
    state = await visitor.ask("search/index")
    while not state["trouble"]:
        state = await visitor.ask("search/index")
    assert "cannot be written" in state["trouble"] and (await visitor.ask("runs"))["runs"]
    assert (await visitor.ask("search", q="x"))["hits"] == []


def test_a_rollout_whose_events_cannot_be_read_is_skipped_and_told_once(
    pool: Pool, tmp_path: Path, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    told = story(pool)
    with pool.read() as connection:
        ids = connection.scalars(select(attempts.c.id).where(attempts.c.rollout_id.in_(told.rollouts))).all()
    for attempt_id in ids:
        Work(pool, attempt_id).call({"content": {"no": "text"}}, after=None, ordinal=99)
    with caplog.at_level("ERROR"):
        index = built(pool, tmp_path / "index")
    assert progress(index).whole and progress(index).outcomes_whole
    assert found(index, event="retry_loop") == [] and found(index, failure="verifier") == told.rollouts[1:]
    assert [record.message.split()[0] for record in caplog.records] == ["rollout"]
    index.close()
