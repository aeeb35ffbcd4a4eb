"""Behaviour and logs of an attempt, as its page shows them."""

from pathlib import Path

import msgspec

from proxy.pool.browse.attempts.logs import PIECE
from proxy.pool.database import open_pool
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import HOSTILE, Story, story


async def test_the_events_of_an_attempt_lead_to_its_calls(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask(f"attempts/{told.attempt}/events")
    kinds = {(event["kind"], event["completion"]) for event in page["events"]}
    assert ("retry_loop", told.calls[2]) in kinds and ("tool_failed", told.calls[0]) in kinds
    assert page["calls"] == len(told.calls) and not page["more"] and page["unknown"] == 0


async def test_a_log_beside_the_pool_is_read_in_pieces(visit: Visit, tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    told = story(pool)
    logs = tmp_path / "runs" / "logs"
    logs.mkdir(parents=True)
    text = f"{HOSTILE[1]}\n" + "line of a log\n" * 10_000
    (logs / f"attempt-{told.attempt}.log").write_bytes(text.encode() + b"\xff\xfe end")
    visitor = await visit(pool.url)
    none = await visitor.ask(f"attempts/{told.attempt}/log")
    assert none["text"] == "" and "not beside its pool" in none["missing"]
    (tmp_path / "runs" / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "other"}))
    assert (await visitor.ask(f"attempts/{told.attempt}/log"))["missing"]
    (tmp_path / "runs" / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
    last = await visitor.ask(f"attempts/{told.attempt}/log")
    assert last["text"].endswith("\ufffd\ufffd end") and last["offset"] == last["total"] - PIECE
    first = await visitor.ask(f"attempts/{told.attempt}/log", offset=0, until=last["offset"])
    assert first["text"].startswith(HOSTILE[1]) and first["next"] == last["offset"]
    other = await visitor.ask(f"attempts/{told.attempt + 1}/log")
    assert "has no log of this attempt" in other["missing"]
    session = await visitor.ask(f"attempts/{told.session}/log")
    assert session["missing"].startswith("a session has no log")
    pool.close()
