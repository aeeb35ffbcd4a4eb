"""Sampling parameters: runs force the training distribution, sessions may choose."""

from typing import Any

import pytest

from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.sampling import TRAINING_DISTRIBUTION
from tests.proxy.conftest import Serve, Stand, user

COLD: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "frequency_penalty": 1.0, "top_k": 3}


def issued_key(stand: Stand, purpose: str) -> str:
    """The key of an attempt in a run of this purpose."""
    run = open_run(stand.pool, f"a {purpose} run", purpose, {})
    (rollout,) = open_group(stand.pool, run.id, {"id": "t", "domain": "agent"}, 1)
    return open_attempt(stand.pool, rollout.rollout_id, "command")[1]


@pytest.mark.parametrize("purpose", ["train", "eval", "collect"])
async def test_runs_force_the_training_distribution(serve: Serve, purpose: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    key = issued_key(stand, purpose)
    assert (await stand.chat(user("hi"), key=key, **COLD))["status"] == 200
    assert stand.engine is not None and stand.engine.last_params.items() >= TRAINING_DISTRIBUTION.items()
    assert stand.recorded(key)[0].untrainable is None


async def test_a_session_gets_what_it_asks(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"), **COLD)
    assert stand.engine is not None and stand.engine.last_params.items() >= COLD.items()
    assert "'temperature': 0.2" in str(stand.recorded()[0].untrainable)


async def test_an_issued_key_serves_off_loopback(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", host="0.0.0.0")
    key = issued_key(stand, "train")
    assert (await stand.chat(user("hi"), key=key))["status"] == 200
