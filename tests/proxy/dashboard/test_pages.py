"""What the pages are made of: runs, curves, queue, account, groups, rollouts, calls, conversations, tokens."""

import time
from dataclasses import replace
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace as replace_fields
from sqlalchemy import insert, select, update

from proxy.pool.browse.attempts.attempt import MOST_CALLS
from proxy.pool.browse.attempts.conversation import MOST_TEXT, MOST_TURNS
from proxy.pool.browse.changes import marks
from proxy.pool.browse.steps import spread
from proxy.pool.browse.tokens.page import MOST_TOKENS
from proxy.pool.completions.records import RequestShape
from proxy.pool.database import Pool, insert_row
from proxy.pool.processes.owners import TRAINER, owned, this_process
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import DEFAULTS, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run, open_run
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, runs, tasks, train_steps
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.steps import Published, versions
from tests.pool.make import TASK, publish_next
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import HOSTILE, Story, Work, many_calls, story


async def test_the_list_of_runs_has_state_step_reward_and_alarms(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask("runs")
    evaluation, train = page["runs"]
    assert (evaluation["name"], evaluation["purpose"], evaluation["step"]) == (told.evaluation, "eval", None)
    assert (train["state"], train["step"], train["alarms"]) == ("nobody works at it", 3, ["kl_rollout"])
    assert (train["watched"], train["advice"]) == ([], ["waiting"])
    assert train["paused"] == "kl_rollout" and train["groups"] == 5
    assert (train["running"], train["cut_off"], evaluation["cut_off"]) == (0, 1, 0)
    assert train["curve"] == [[step, pytest.approx(0.2 + step / 100)] for step in (1, 2, 3)]
    assert evaluation["reward"] == {"mean": 0.5, "rewards": 2, "rollouts": 3, "groups": 3}
    assert page["before"] is None and (await visitor.ask("runs", before=train["id"]))["runs"] == []


async def test_what_has_no_outcome_is_cut_off_unless_a_harness_works_at_its_run(
    visit: Visit, database: str, pool: Pool
) -> None:
    """A killed harness leaves its claim on the run, and one that was stopped or has finished gives it up."""
    told = story(pool)
    visitor = await visit(database)
    run = find_run(pool, "train")
    with owned(pool, run):
        assert await unfinished(visitor, told) == ("paused", 1, 0, [False] * 4)
        before = marks(pool)
    assert await unfinished(visitor, told) == ("nobody works at it", 0, 1, [True] * 4)
    assert marks(pool).since(before) == ["working"]
    killed = replace_fields(this_process(), started="long ago")
    with pool.write() as connection:
        values = {"owner": to_builtins(killed), "owner_seen_at": time.time()}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    assert await unfinished(visitor, told) == ("nobody works at it", 0, 1, [True] * 4)
    with owned(pool, run, TRAINER):
        assert await unfinished(visitor, told) == ("paused", 0, 1, [True] * 4)
    finished = await visitor.ask(f"rollouts/{told.rollouts[0]}")
    assert not finished["cut_off"] and not (await visitor.ask(f"groups/{told.group}"))["group"]["cut_off"]
    assert not (await visitor.ask(f"attempts/{told.session}"))["cut_off"]


async def unfinished(visitor: Visitor, told: Story) -> tuple[str, int, int, list[bool]]:
    """The state of the run, its running and cut off groups, and whether each page says that the open group is one."""
    run = (await visitor.ask("runs/train"))["run"]
    [listed] = (await visitor.ask("runs/train/groups", state="RUNNING"))["groups"]
    group = await visitor.ask(f"groups/{told.open_group}")
    rollout = await visitor.ask(f"rollouts/{group['members'][0]['rollout_id']}")
    attempt = await visitor.ask(f"attempts/{rollout['shown']}")
    cut_off = [each["cut_off"] for each in (listed, group["group"], rollout, attempt)]
    return run["state"], run["running"], run["cut_off"], cut_off


async def test_alarms_of_an_older_run_are_shown_while_somebody_works_at_it(
    visit: Visit, database: str, pool: Pool
) -> None:
    told = story(pool)
    for number in range(25):
        open_run(pool, f"newer {number}", "collect", {})
    visitor = await visit(database)
    assert (await visitor.ask("runs"))["alarms"] == []
    killed = replace_fields(this_process(), started="long ago")
    with owned(pool, find_run(pool, told.evaluation)), owned(pool, find_run(pool, "train"), TRAINER):
        page = await visitor.ask("runs")
        assert "train" not in [run["name"] for run in page["runs"]]
        assert page["alarms"] == [{"name": "train", "paused": "kl_rollout", "alarms": ["kl_rollout"]}]
    with pool.write() as connection:
        values = {"owner": to_builtins(killed), "owner_seen_at": time.time()}
        connection.execute(update(runs).where(runs.c.name == "train").values(values))
    assert (await visitor.ask("runs"))["alarms"] == []


async def test_every_run_is_found_by_a_part_of_its_name(visit: Visit, database: str, pool: Pool) -> None:
    for number in range(30):
        run = open_run(pool, f"run {number} of 50%", "train", {})
        if number % 2:
            publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    visitor = await visit(database)
    newest = (await visitor.ask("run-names"))["names"]
    assert newest == [f"run {number} of 50%" for number in range(29, 4, -1)]
    assert (await visitor.ask("run-names", like="UN 3 "))["names"] == ["run 3 of 50%"]
    assert (await visitor.ask("run-names", like="2", stepped=1))["names"] == [
        f"run {number} of 50%" for number in (29, 27, 25, 23, 21)
    ]
    assert [(await visitor.ask("run-names", like=text))["names"] for text in ("_", "\0")] == [[], []]
    assert len((await visitor.ask("run-names", like="50%"))["names"]) == 25


async def test_a_run_names_its_metrics_rules_and_interventions(visitor: Visitor, told: Story) -> None:
    whole = await visitor.ask("runs/train")
    assert whole["config"] == {"seed": 1, "sandbox": "process"}
    assert {"reward_mean", "reward_by_domain/math", "seconds/push", "alarms"} <= set(whole["metrics"])
    assert whole["rules"] == [
        {"name": "kl_rollout", "level": "alarm", "since": 3, "value": 0.02, "advice": False},
        {"name": "waiting", "level": "alarm", "since": 3, "value": 0.7, "advice": True},
    ]
    assert [done["action"] for done in whole["interventions"]] == ["pause"]
    assert (await visitor.ask("runs/held%20out%2F1"))["run"]["purpose"] == "eval"


async def test_a_curve_has_what_its_steps_have_and_nothing_else(visitor: Visitor) -> None:
    names = ["grad_norm", "no_such", "reward_by_domain/agent", "staleness_tokens"]
    got = await visitor.ask("runs/train/curves", names=names)
    assert got["steps"] == [0, 1, 2, 3] and (got["first"], got["last"], got["left_out"]) == (0, 3, 0)
    assert got["values"]["grad_norm"] == [None, 1.0, None, 1.0] and got["values"]["no_such"] == [None] * 4
    assert got["histograms"]["staleness_tokens"] == [{}, *[{"0": 30.0, "1": 10.0}] * 3]
    some = await visitor.ask("runs/train/curves", names="entropy", first=2, last=3)
    assert some["steps"] == [2, 3] and some["values"]["entropy"] == [0.75, 0.5]


async def test_names_of_metrics_hold_commas_and_histograms_are_among_them(
    visit: Visit, database: str, pool: Pool
) -> None:
    run = open_run(pool, "train", "train", {})
    given = {"tool_failure_rate": {"read, then write": 0.5}, "staleness_groups": {"0": 3, "2": 1}}
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics=given))
    visitor = await visit(database)
    names = (await visitor.ask("runs/train"))["metrics"]
    assert names == ["staleness_groups", "tool_failure_rate/read, then write"]
    got = await visitor.ask("runs/train/curves", names=names)
    assert got["values"] == {"tool_failure_rate/read, then write": [0.5]}
    assert got["histograms"] == {"staleness_groups": [{"0": 3.0, "2": 1.0}]}


async def test_evaluations_stand_at_the_step_of_the_weights_that_made_them(
    visit: Visit, database: str, pool: Pool
) -> None:
    told = story(pool)
    with pool.write() as connection:
        versions = connection.execute(select(policy_versions.c.id).order_by(policy_versions.c.step)).scalars().all()
        evaluation = find_run(pool, told.evaluation).id
        of = select(rollouts.c.id).join(groups, groups.c.id == rollouts.c.group_id).where(groups.c.run_id == evaluation)
        ids = connection.execute(of.order_by(rollouts.c.id)).scalars().all()
        names = [[f"v{versions[2]}"], [f"v{versions[2]}", f"v{versions[1]}"], ["v999"]]
        for id, each in zip(ids, names, strict=True):
            connection.execute(update(rollouts).where(rollouts.c.id == id).values(versions=each))
    visitor = await visit(database)
    got = await visitor.ask("runs/train/rewards")
    points = [{"step": 2, "reward": 0.5, "rewards": 2}]
    assert got["evaluations"] == {
        "all": {told.evaluation: points},
        "agent": {f"scaffold ({told.evaluation})": points},
        "domain": {f"agent ({told.evaluation})": points},
    }
    assert not got["older"]


async def test_evaluations_that_a_run_asked_for_are_points_of_its_curves(
    visit: Visit, database: str, pool: Pool
) -> None:
    """Of a rollout that was replaced the newest counts, a masked cheat does not, nor what a rollback retired."""
    story(pool)
    run = find_run(pool, "train")
    rewards = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.5]}
    for version in sorted(versions(pool, run.id), key=lambda each: each.step)[:3]:
        evaluation = open_evaluation(pool, run, version, {}, engine="", rollouts=2)
        ends = [Outcome(attempt_id=None, reward=reward) for reward in rewards[version.step]]
        ends.append(Outcome(attempt_id=None, reward=1.0, hacked="mask"))
        first = evaluated(pool, evaluation.run_id, Outcome(attempt_id=None, reward=None, failure="tool_flake"))
        evaluated(pool, evaluation.run_id, ends[0], replaces=first)
        for end in ends[1:]:
            evaluated(pool, evaluation.run_id, end)
    visitor = await visit(database)
    found = (await visitor.ask("runs/train/rewards"))["evaluations"]
    points = found["all"]["evaluated, held-out tasks"]
    assert found["agent"]["held (evaluated, held-out tasks)"] == points
    assert found["domain"]["agent (evaluated, held-out tasks)"] == points
    assert [point["step"] for point in points] == [0, 1, 2]
    assert [(point["reward"], point["rewards"]) for point in points] == [(0.5, 2), (1.0, 2), (0.5, 1)]
    with pool.write() as connection:
        last = policy_versions.c.step == 2
        connection.execute(update(policy_versions).where(last).values(retired_at=1.0))
    found = (await visitor.ask("runs/train/rewards"))["evaluations"]
    assert len(found["all"]["evaluated, held-out tasks"]) == 2


async def test_held_out_and_trained_tasks_are_apart_in_curves_and_matrix(
    visit: Visit, database: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task is compared by what it asks for, not by its name."""
    run = open_run(pool, "train", "train", {})
    known, new = TASK, {"id": "new", "instruction": "do another", "domain": "math"}
    open_group(pool, run.id, known, 1, replace(DEFAULTS, agent="own"))
    open_group(pool, run.id, new, 1, replace(DEFAULTS, agent="own", held_out=True))
    for step in (0, 1, 2):
        version = publish_next(pool, run.id, Published(step=step, checkpoint="c", hf_dir="h", metrics={}))
        evaluation = open_evaluation(pool, run, version, {}, engine="", rollouts=3)
        for task, agent, reward in [(known | {"id": "renamed"}, "own", 1.0), (new, "own", 0.0), (new, "other", 0.5)][
            : 3 - step % 2
        ]:
            evaluated(pool, evaluation.run_id, Outcome(attempt_id=None, reward=reward), agent=agent, task=task)
    visitor = await visit(database)
    found = (await visitor.ask("runs/train/rewards"))["evaluations"]
    assert {name: points[0]["reward"] for name, points in found["all"].items()} == {
        "evaluated, trained tasks": 1.0, "evaluated, held-out tasks": 0.25
    }  # fmt: skip
    assert list(found["agent"]) == [
        "other (evaluated, held-out tasks)", "own (evaluated, held-out tasks)", "own (evaluated, trained tasks)"
    ]  # fmt: skip
    assert list(found["domain"]) == ["agent (evaluated, trained tasks)", "math (evaluated, held-out tasks)"]
    matrix = await visitor.ask("runs/train/evaluations")
    lines = [(line["step"], line["trained"], line["evaluation"]) for line in matrix["lines"]]
    assert lines == [(0, [], "train-eval-v1"), (2, ["own"], "train-eval-v3")]  # that of step 1 is not finished
    cells = [(cell["agent"], cell["agent_held_out"], cell["tasks"]) for cell in matrix["lines"][1]["cells"]]
    assert cells == [
        ("other", True, "held-out tasks"), ("own", False, "held-out tasks"), ("own", False, "trained tasks")
    ]  # fmt: skip
    assert [cell["reward"] for cell in matrix["lines"][1]["cells"]] == [0.5, 0.0, 1.0]
    assert (await visitor.ask("runs/train-eval-v1/evaluations"))["lines"] == []
    monkeypatch.setattr("proxy.pool.browse.evaluated.MOST_TASKS", 1)
    found = (await visitor.ask("runs/train/rewards"))["evaluations"]
    assert "evaluated, held-out tasks" not in found["all"] and "evaluated" in found["all"]


def evaluated(
    pool: Pool, run_id: int, outcome: Outcome, replaces: int | None = None, agent: str = "held", task: Any = TASK
) -> int:
    """Open a group of one rollout and end it; the group's id."""
    [member] = open_group(pool, run_id, task, 1, replace(DEFAULTS, agent=agent, replaces=replaces))
    finish_rollout(pool, member.rollout_id, outcome)
    return member.group_id


def test_steps_are_spread_evenly_with_both_ends() -> None:
    assert spread(1, 5, 24) == [1, 2, 3, 4, 5] and spread(0, 0, 2) == [0] and spread(3, 2, 4) == []
    wide = spread(0, 15_625, 400)
    assert len(wide) == len(set(wide)) == 400 and (wide[0], wide[-1]) == (0, 15_625)


async def test_the_queue_shows_slots_and_says_who_waits(visitor: Visitor, told: Story) -> None:
    queue = await visitor.ask("runs/train/queue")
    assert [(slot["state"], slot["members"], slot["finished"]) for slot in queue["slots"]][-1] == ("RUNNING", 2, 0)
    assert (queue["step_groups"], queue["window"], queue["slots"][-1]["in_window"]) == (1, 2, True)
    assert queue["limit"] == 4 and not queue["attended"]
    assert queue["waits"] == "nobody works at the run, and rule kl_rollout has paused it"
    dropped = {each["reason"]: each["groups"] for each in queue["dropped"]}
    assert dropped == {"too_few_valid": 1} and queue["dropped_of"] == 1


async def test_the_account_is_the_account(visitor: Visitor) -> None:
    now = await visitor.ask("runs/train/account")
    parts = [now["trained"], *now["left_out"].values(), *now["waiting"].values()]
    assert now["unaccounted"] == 0 and now["sampled"] == sum(part["tokens"] for part in parts) > 0


async def test_groups_come_by_state_and_step(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask("runs/train/groups")
    assert [group["queue_index"] for group in page["groups"]] == [4, 3, 2, 1, 0] and page["before"] is None
    of_step = await visitor.ask("runs/train/groups", step=2)
    assert [group["step"] for group in of_step["groups"]] == [2]
    [dropped] = (await visitor.ask("runs/train/groups", state="TOMBSTONE"))["groups"]
    assert dropped["id"] == told.group and dropped["rewards"] == [1.0, None] and dropped["reason"] == "too_few_valid"


async def test_what_is_long_comes_in_pages(visit: Visit, database: str, pool: Pool) -> None:
    run = open_run(pool, "many", "train", None)
    with pool.write() as connection:
        task = insert_row(connection, tasks, {"run_id": run.id, "name": "t", "domain": "agent", "spec": {}})
        group = {"run_id": run.id, "task_id": task, "size": 1, "state": "RUNNING", "created_at": 1.0}
        connection.execute(insert(groups), [group | {"queue_index": n, "position": n} for n in range(65)])
        values = {"number": 0, "key_hash": "session", "agent": "session", "opened_at": 1.0}
        session, other = (insert_row(connection, attempts, values | {"key_hash": key}) for key in ("a", "b"))
    many_calls(pool, other, MOST_CALLS + 5)
    work = Work(pool, session)
    for _ in range(MOST_TURNS + 3):
        work.call({"content": "on"}, prompt=60)
    visitor = await visit(database)
    first = await visitor.ask("runs/many/groups")
    rest = await visitor.ask("runs/many/groups", before=first["before"])
    seen = [each["queue_index"] for each in first["groups"] + rest["groups"]]
    assert seen == list(range(64, -1, -1)) and len(first["groups"]) == 50 and rest["before"] is None
    page = await visitor.ask(f"attempts/{other}/calls")
    rest = await visitor.ask(f"attempts/{other}/calls", first=page["next"])
    assert len(page["calls"]) == MOST_CALLS and len(rest["calls"]) == 5 and rest["next"] is None
    last = await visitor.ask(f"completions/{work.ids[-1]}/conversation")
    assert [turn["completion"] for turn in last["turns"]] == work.ids[3:] and last["before"] == work.ids[2]
    first = await visitor.ask(f"completions/{last['before']}/conversation")
    assert [turn["completion"] for turn in first["turns"]] == work.ids[:3] and first["before"] is None
    whole = list(work.paths[work.ids[-1]])
    begin = await visitor.ask(f"completions/{work.ids[-1]}/tokens")
    end = await visitor.ask(f"completions/{work.ids[-1]}/tokens", offset=MOST_TOKENS)
    assert begin["total"] == 43 * 66 and begin["ids"] == whole[:MOST_TOKENS] and end["ids"] == whole[MOST_TOKENS:]
    far = await visitor.ask(f"completions/{work.ids[-1]}/tokens", offset=10**6)
    assert far["ids"] == [] and far["offset"] == 43 * 66


async def test_a_group_has_its_members_side_by_side(visitor: Visitor, told: Story) -> None:
    view = await visitor.ask(f"groups/{told.group}")
    assert [member["reward"] for member in view["members"]] == [1.0, None]
    assert view["members"][0]["reward_parts"] == {"tests": 1.0, "style": 0.5, "<i>part</i>": -0.25}
    assert view["members"][1]["failure"] == "verifier" and view["instruction"].startswith("Mend the parser.")


async def test_a_rollout_has_verdict_attempts_and_place(visitor: Visitor, told: Story) -> None:
    view = await visitor.ask(f"rollouts/{told.rollouts[0]}")
    assert (view["reward"], view["run"], view["group_state"]) == (1.0, "train", "TOMBSTONE")
    assert view["members"] == told.rollouts and view["shown"] == told.attempt
    assert [(each["final"], each["place"]) for each in view["attempts"]] == [(True, "too_few_valid")]
    failed = await visitor.ask(f"rollouts/{told.rollouts[1]}")
    assert failed["reward"] is None and failed["meaning"].startswith("the verifier gave no verdict")


async def test_the_calls_of_an_attempt_are_a_tree(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask(f"attempts/{told.attempt}/calls")
    calls = page["calls"]
    first, *rest = told.calls
    assert [call["id"] for call in calls] == [first, *rest[:4], rest[6], rest[4], rest[5]]
    assert [call["depth"] for call in calls] == [0, 1, 1, 1, 1, 1, 0, 0]
    assert [call["label"] for call in calls[-2:]] == ["side", "subagent"]
    assert [call["queued_seconds"] for call in calls] == [None, *[0.5] * 7]
    assert calls[0]["prompt_tokens"] == 300 and calls[1]["prompt_tokens"] == 311 and calls[1]["new_tokens"] == 5
    assert calls[0]["tools"] == ["bash"] and calls[0]["words"].startswith("<script>")
    view = await visitor.ask(f"attempts/{told.attempt}")
    assert view["timings"]["setup"] == 1.5 and view["calls_in_all"] == len(calls)


async def test_a_session_outside_of_runs_can_be_looked_at(visitor: Visitor, told: Story) -> None:
    [session] = (await visitor.ask("sessions"))["sessions"]
    assert (session["id"], session["calls"]) == (told.session, 1)
    assert (await visitor.ask("sessions", before=told.session))["sessions"] == []
    view = await visitor.ask(f"attempts/{told.session}")
    assert view["run"] is None and view["closed_at"] is None
    [call] = (await visitor.ask(f"attempts/{told.session}/calls"))["calls"]
    assert call["words"] == "hello"


async def test_a_conversation_has_results_reasoning_and_calls_and_cuts_what_is_long(
    visitor: Visitor, told: Story
) -> None:
    page = await visitor.ask(f"completions/{told.calls[4]}/conversation")
    assert [turn["completion"] for turn in page["turns"]] == told.calls[:5] and page["before"] is None
    assert page["instruction"].startswith("Mend the parser.")
    first, *_, last = page["turns"]
    assert first["reasoning"]["text"] == HOSTILE[4] and first["content"]["text"] == HOSTILE[0]
    assert page["turns"][1]["results"][0]["error"] and first["calls"][0]["tool"] == "bash"
    assert last["content"]["size"] == 1_000_000 and len(last["content"]["text"]) == MOST_TEXT
    assert last["results"][0]["size"] == 1_000_000 and "?" in last["results"][1]["head"]
    whole, at, total = "", 0, 1
    while at < total:
        piece = await visitor.ask(f"completions/{told.calls[4]}/reply", offset=at)
        whole, at, total = whole + piece["text"], at + len(piece["text"]), piece["total"]
    assert HOSTILE[3] in whole


async def test_only_the_main_work_begins_with_the_instruction_of_the_task(
    visit: Visit, database: str, pool: Pool
) -> None:
    told, run = story(pool), find_run(pool, "train")
    [member] = open_group(pool, run.id, TASK, 1)
    work = Work(pool, open_attempt(pool, member.rollout_id, "live")[0].id)
    packed = [to_builtins(RequestShape(tools=7, opening=1)), to_builtins(RequestShape(opening=2))]
    live = [work.call({"content": "x"}, after=None, shape=shape) for shape in packed]
    visitor = await visit(database)
    for call, given in zip([*told.calls[4:], *live], (True, False, False, True, True, False), strict=True):
        page = await visitor.ask(f"completions/{call}/conversation")
        assert page["before"] is None and (page["instruction"] is not None) == given, call
    labels = [call["label"] for call in (await visitor.ask(f"attempts/{work.attempt_id}/calls"))["calls"]]
    assert labels == ["main", "side"]


async def test_tokens_have_their_logprobs_versions_and_who_sampled_them(visitor: Visitor, told: Story) -> None:
    page = await visitor.ask(f"completions/{told.calls[1]}/tokens")
    assert page["total"] == len(page["ids"]) == 300 + 6 + 5 + 6 and page["prompt_length"] == 311
    assert page["by"][:300] == [None] * 300 and page["by"][300:306] == [told.calls[0]] * 6
    assert page["by"][306:] == [None] * 5 + [told.calls[1]] * 6
    assert page["logprobs"][300:302] == [-0.25, -0.5] and page["versions"][311] == "v1"
    assert page["texts"][0] == f"<{page['ids'][0]}>" and any("tokenizer" in note for note in page["notes"])
    assert any("no step that counts" in note for note in page["notes"]) and page["step"] is None


async def test_given_and_damaged_tokens_are_told_apart(visit: Visit, database: str, pool: Pool) -> None:
    with pool.write() as connection:
        values = {"number": 0, "key_hash": "session", "agent": "session", "opened_at": 1.0}
        session = insert_row(connection, attempts, values)
    work = Work(pool, session)
    given = work.call({"content": "x"}, given=[[1, 3]])
    damaged = work.call({"content": "y"}, path_crc=1)
    visitor = await visit(database)
    page = await visitor.ask(f"completions/{given}/tokens")
    assert page["given"][5:] == [False, True, True, False, False, False] and page["by"][6] is None
    assert page["logprobs"][5:] == [-0.25, None, None, -0.5, -0.75, -1.0]
    page = await visitor.ask(f"completions/{damaged}/tokens")
    assert any("checksum" in note for note in page["notes"]) and len(page["ids"]) == 22


@pytest.mark.parametrize(
    ("path", "status", "given"),
    [
        ("runs/none", 404, {}),
        ("runs/%00", 404, {}),
        ("runs/%00/groups", 404, {}),
        ("search", 404, {"run": "\0"}),
        ("rollouts/999999", 404, {}),
        ("groups/999999", 404, {}),
        ("attempts/999999", 404, {}),
        ("completions/999999/tokens", 404, {}),
        ("completions/999999/conversation", 404, {}),
        ("completions/999999/reply", 404, {}),
        ("rollouts/x", 400, {}),
        ("rollouts/99999999999999999999", 400, {}),
        ("runs/train/groups", 400, {"state": "GONE"}),
        ("runs/train/groups", 400, {"state": "x" * 300}),
        ("runs/train/groups", 400, {"before": "-1"}),
        ("runs/train/curves", 400, {"names": [f"m{n}" for n in range(65)]}),
        ("runs/train/curves", 400, {"first": "१"}),
        ("nowhere", 404, {}),
    ],
)
async def test_what_is_not_there_or_not_understood_is_one_sentence(
    visitor: Visitor, path: str, status: int, given: dict[str, Any]
) -> None:
    assert (await visitor.ask(path, status, **given))["error"]


async def test_a_run_of_many_steps_is_drawn_from_some_of_them(visit: Visit, database: str, pool: Pool) -> None:
    run = open_run(pool, "long", "train", None)
    version = {"run_id": run.id, "checkpoint": "c", "hf_dir": "h", "created_at": 1.0}
    with pool.write() as connection:
        connection.execute(insert(policy_versions), [version | {"step": step} for step in range(450)])
        rows = connection.execute(select(policy_versions.c.id, policy_versions.c.step)).all()
        steps = [{"version_id": row.id, "metrics": {"reward_mean": row.step / 450}} for row in rows]
        connection.execute(insert(train_steps), steps)
    visitor = await visit(database)
    got = await visitor.ask("runs/long/curves", names="reward_mean")
    assert len(got["steps"]) == 400 and got["left_out"] == 50 and got["steps"][-1] == 449
    assert got["values"]["reward_mean"] == pytest.approx([step / 450 for step in got["steps"]])
    part = await visitor.ask("runs/long/curves", names="reward_mean", first=100, last=120)
    assert part["steps"] == list(range(100, 121)) and part["left_out"] == 0
