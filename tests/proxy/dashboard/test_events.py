"""Behaviour and logs of an attempt, as its page shows them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.engine import make_url

from proxy.pool.browse.attempts.logs import BLOCK, PIECE
from proxy.pool.browse.groups import group_view
from proxy.pool.browse.rollout import rollout_view
from proxy.pool.database import Pool, insert_row, open_pool
from proxy.pool.processes.owners import owned
from proxy.pool.rollouts.runs import find_run, note_directory
from proxy.pool.schema import attempts
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.steps import versions
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import HOSTILE, Story, plant, story


async def test_the_events_of_an_attempt_lead_to_its_calls(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask(f"attempts/{told.attempt}/events")
    kinds = {(event["kind"], event["completion"]) for event in page["events"]}
    assert ("retry_loop", told.calls[2]) in kinds and ("tool_failed", told.calls[0]) in kinds
    named = {str(completion) for _, completion in kinds}
    assert page["ordinals"] == {str(id): at for at, id in enumerate(told.calls) if str(id) in named}
    assert page["calls"] == len(told.calls) and not page["more"] and page["unknown"] == 0


def text_of(piece: dict[str, Any]) -> str:
    return "".join(block["text"] for block in piece["blocks"])


async def test_a_log_beside_the_pool_is_read_in_pieces(visit: Visit, tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    told = story(pool)
    logs = tmp_path / "runs" / "logs"
    logs.mkdir(parents=True)
    text = f"{HOSTILE[1]}\n" + "line of a log\n" * 10_000
    (logs / f"attempt-{told.attempt}.log").write_bytes(text.encode() + b"\xff\xfe end")
    visitor = await visit(pool.url)
    none = await visitor.ask(f"attempts/{told.attempt}/log")
    assert none["blocks"] == [] and "not on this machine" in none["missing"]
    (tmp_path / "runs" / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "other"}))
    assert (await visitor.ask(f"attempts/{told.attempt}/log"))["missing"]
    (tmp_path / "runs" / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
    last = await visitor.ask(f"attempts/{told.attempt}/log")
    assert text_of(last).endswith("\ufffd\ufffd end") and last["offset"] == last["total"] - PIECE
    first = await visitor.ask(f"attempts/{told.attempt}/log", offset=0, until=last["offset"])
    assert text_of(first).startswith(HOSTILE[1]) and first["next"] == last["offset"]
    whole = text.encode() + b"\xff\xfe end"
    offsets = [block["offset"] for piece in (first, last) for block in piece["blocks"]]
    assert len(offsets) > len(whole) // (2 * BLOCK)
    begins = [offset for offset in offsets if offset != last["offset"]]  # a piece may begin within a line
    assert all(whole[:offset].endswith(b"\n") for offset in begins[1:]) and begins[0] == 0
    place = await visitor.ask(f"attempts/{told.attempt}/log", offset=begins[2])
    assert place["blocks"][0] == first["blocks"][2] and place["offset"] == begins[2]
    other = await visitor.ask(f"attempts/{told.attempt + 1}/log")
    assert "has no output of this attempt" in other["missing"]
    session = await visitor.ask(f"attempts/{told.session}/log")
    assert "a session's agent" in session["missing"]
    pool.close()


async def test_the_output_of_an_agent_that_still_works_is_said_to_come(visit: Visit, tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    told = story(pool)
    [open_one, _] = group_view(pool, told.open_group).members
    attempt = rollout_view(pool, open_one.rollout_id).shown
    visitor = await visit(pool.url)
    comes = "the agent's output comes when the agent has ended"
    with owned(pool, find_run(pool, "train")):
        assert "not on this machine" in (await visitor.ask(f"attempts/{attempt}/log"))["missing"]
        (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
        assert (await visitor.ask(f"attempts/{attempt}/log"))["missing"] == comes
        assert "was cut off" in (await visitor.ask(f"attempts/{told.attempt}/log"))["missing"]
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / f"attempt-{attempt}.log").write_text("done")  # its verifier still works
        assert text_of(await visitor.ask(f"attempts/{attempt}/log")) == "done"
        (tmp_path / "logs" / f"attempt-{attempt}.log").unlink()
    assert "was cut off" in (await visitor.ask(f"attempts/{attempt}/log"))["missing"]
    pool.close()


async def test_a_log_is_found_where_the_pool_says_that_its_run_keeps_it(
    visit: Visit, database: str, pool: Pool, tmp_path: Path
) -> None:
    """Also by a reader with a name of its own, and of an evaluation that the run asked for; never in another place."""
    told, run = story(pool), find_run(pool, "train")
    directory = tmp_path / "not" / "beside" / "it"
    (directory / "logs").mkdir(parents=True)
    evaluation = open_evaluation(pool, run, versions(pool, run.id)[0], {}, engine="", rollouts=1)
    with pool.write() as connection:
        place = {"run_id": evaluation.run_id, "number": 0, "key_hash": "evaluates", "agent": "a", "opened_at": 1.0}
        evaluated = insert_row(connection, attempts, place)
    for attempt in (told.attempt, evaluated):
        (directory / "logs" / f"attempt-{attempt}.log").write_text(f"the log of {attempt}")
    note_directory(pool, run.id, directory)
    visitor = await visit(database)
    assert "not on this machine" in (await visitor.ask(f"attempts/{told.attempt}/log"))["missing"]
    by_another = make_url(pool.url)
    if pool.dialect == "postgresql":
        by_another = by_another.set(username="reader", query={})
    where = {"pool": by_another.render_as_string(hide_password=False), "name": "train"}
    (directory / "whereabouts.json").write_bytes(msgspec.json.encode(where))
    for attempt in (told.attempt, evaluated):
        assert (await visitor.ask(f"attempts/{attempt}/log"))["blocks"] == [
            {"offset": 0, "text": f"the log of {attempt}"}
        ]


@pytest.mark.parametrize("kind", ["pipe", "link", "endless link"])
async def test_a_log_that_is_no_file_of_the_directory_is_not_shown(visit: Visit, tmp_path: Path, kind: str) -> None:
    """A link could show any file of the dashboard's user."""
    pool = open_pool(str(tmp_path / "pool.db"))
    told, visitor = story(pool), await visit(pool.url)
    (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
    log = tmp_path / "logs" / f"attempt-{told.attempt}.log"
    log.parent.mkdir()
    log.write_text("a secret")
    assert text_of(await visitor.ask(f"attempts/{told.attempt}/log")) == "a secret"
    plant(log, kind)
    shown = await visitor.ask(f"attempts/{told.attempt}/log")
    assert shown["blocks"] == [] and "has no output of this attempt" in shown["missing"]
    pool.close()
