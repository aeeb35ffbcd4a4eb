"""The monitor: states and figures worked by hand, and what an alarm does to a run with a small model."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
from sqlalchemy import select, update

from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row, open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.account import account
from proxy.pool.inspect.rule_states import ADVICE
from proxy.pool.rollouts import runs
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions, groups, policy_versions, rollouts
from proxy.pool.settings_file import checked
from proxy.pool.training import steps
from proxy.pool.training.interventions import history_of, paused
from tests.trainer.make import make_config, new_completion, write_model
from tests.trainer.test_report import group, rollout
from tests.trainer.test_reporter import CALM as SILENT
from tests.trainer.test_reporter import noted, shown
from trainer.commands.main import main
from trainer.config import Config
from trainer.config.monitor import MonitorConfig, Rule
from trainer.config.report import AlarmName
from trainer.loop import prune, train
from trainer.megatron.parallel import Ranks
from trainer.monitor import liveness
from trainer.monitor.builtin import BUILT_IN, LOST, watched_rules
from trainer.monitor.figures import compared, flat
from trainer.monitor.liveness import PhaseWatch, slowest
from trainer.monitor.monitor import sentence, tasks_that_break
from trainer.monitor.rollouts import lengths, own_figures
from trainer.monitor.states import OK, RuleState, advance
from trainer.report.reporter import Reporter, StepReport
from trainer.step_files import checkpoint, complete, exported

LABELS = ("main",)


def test_a_rule_goes_to_alarm_and_back_only_after_steps_in_a_row() -> None:
    """b: the step broke the bound, k: it kept it, -: its value is not known."""
    cases = [
        (1, "kbbkk", "ok alarm alarm ok ok"),
        (2, "bkbbkbkkb", "watch ok watch alarm alarm alarm alarm ok watch"),
        (2, "b-bk-k", "watch watch alarm alarm alarm ok"),
        (3, "bbkbbbkkk", "watch watch ok watch watch alarm alarm alarm ok"),
    ]
    for steps_, seen, levels in cases:
        state, reached = OK, []
        for step, kind in enumerate(seen, 1):
            state = advance(state, {"b": True, "k": False, "-": None}[kind], steps_, step)
            reached.append(state.level)
        assert reached == levels.split(), (steps_, seen)
    state = OK
    for step, broken in enumerate([False, True, True, True, False], 1):
        state = advance(state, broken, 2, step, 0.5)
        assert state.entered(step) == (step == 3)
    assert state == RuleState("alarm", since=2, at=3, count=1, value=0.5) == RuleState.from_json(state.to_json())


CALM: dict[str, Any] = {
    "negative_length_p99": 30.0,
    "positive_length_p99": 20.0,
    "negative_gradient_share": 0.7,
    "negative_weight_share": 0.7,
    "kl_rollout": 0.013,
    "extreme_tokens": 0.1,
    "clip_fraction": 0.45,
    "staleness_groups": {"1": 4, "4": 4},
    "groups": 10,
    "equal_groups": 5,
    "unused_groups": {"equal_rewards": 10},
    "sampled_tokens": 1000,
    "excluded_tokens": {"logprob_not_finite": 1, "label: side": 500},
    "unaccounted_tokens": 0,
    "truncated_share": 0.25,
    "abort_share": 0.05,
    "seconds": {"wait": 5.0, "train": 5.0},
    "slow_phase": 6.0,
}


def raised(metrics: dict[str, Any], silent: tuple[str, ...] = (), oldest: int = 4) -> list[str]:
    figures = flat(metrics, oldest)
    values = [(watched, compared(watched.rule, figures, ())) for watched in watched_rules((), silent)]
    return [watched.rule.name for watched, value in values if value is not None and watched.rule.breaks(value)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slow_phase", {"slow_phase": 6.1}),
        ("aborts", {"abort_share": 0.051}),
        ("truncated_rollouts", {"truncated_share": 0.26}),
        ("waiting", {"seconds": {"wait": 5.1, "train": 5.0}}),
        ("length_ratio", {"negative_length_p99": 30.1}),
        ("negative_gradient_share", {"negative_gradient_share": 0.71}),
        ("negative_weight_share", {"negative_weight_share": 0.71}),
        ("kl_rollout", {"kl_rollout": 0.0131}),
        ("extreme_tokens", {"extreme_tokens": 0.11}),
        ("clip_fraction", {"clip_fraction": 0.46}),
        ("stale_groups", {"staleness_groups": {"1": 3, "4": 3, "5": 1}}),
        ("equal_groups", {"equal_groups": 6}),
        ("skipped_groups", {"unused_groups": {"equal_rewards": 11, "stale": 1}}),
        ("impossible_tokens", {"excluded_tokens": {"logprob_not_finite": 2}}),
        ("too_long_tokens", {"excluded_tokens": {"too_long": 11}}),
    ],
)
def test_a_rule_of_every_run_is_broken_above_its_bound_and_not_when_it_is_silent(
    name: str, change: dict[str, Any]
) -> None:
    assert raised(CALM) == []
    assert raised(CALM | change) == [name]
    assert raised(CALM | change, (name,)) == []


def test_lost_tokens_are_an_alarm_that_cannot_be_switched_off() -> None:
    off = get_args(AlarmName)
    assert {*off, LOST} == BUILT_IN.keys()
    assert raised(CALM | {"unaccounted_tokens": -3}, off) == [LOST]
    assert raised({}) == [] and raised(CALM, (), 0) == []


def test_liveness_comes_first_and_a_rule_of_the_same_name_replaces_one() -> None:
    own = Rule(name="aborts", figure="abort_share", above=0.5, action="pause"), Rule(name="x", figure="loss", below=0)
    rules = watched_rules(own, ())
    assert [watched.concern for watched in rules] == ["liveness"] * 6 + ["optimisation"] * 10 + ["advice"]
    assert {watched.rule.name for watched in rules if watched.concern == "advice"} == ADVICE
    [aborts] = [watched for watched in rules if watched.rule.name == "aborts"]
    assert aborts.rule is own[0] and sentence(aborts, RuleState("alarm", 3, 5, 0, 0.75)) == (
        "aborts = 0.75 is above 0.5, since step 3: attempts fail; see results.jsonl, `proxy pool events`"
    )


def test_a_trend_compares_with_the_mean_of_the_steps_before() -> None:
    rule = Rule(name="fall", figure="reward_mean", below=-0.2, trend="difference")
    before = [{"reward_mean": value} for value in (9.0, *[0.4] * 5, *[0.6] * 5)]  # the first is too long ago
    assert compared(rule, {"reward_mean": 0.25}, before) == pytest.approx(-0.25)
    ratio = msgspec.structs.replace(rule, trend="ratio")
    assert compared(ratio, {"reward_mean": 0.25}, before) == pytest.approx(0.5)
    assert compared(rule, {"reward_mean": 0.25}, before[:2]) is None  # too few
    assert (
        compared(rule, {}, before) is None and compared(ratio, {"reward_mean": 1.0}, [{"reward_mean": 0.0}] * 3) is None
    )


def test_a_phase_is_slow_that_takes_six_medians_and_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [{"seconds": {"wait": wait, "train": 100.0}} for wait in (200.0, 300.0, 9000.0)]
    assert slowest({"wait": 1799.0, "train": 1799.0}, before) == 0.0
    assert slowest({"wait": 1800.0, "train": 1900.0, "push": 9999.0}, before) == 19.0
    assert slowest({"wait": 9999.0}, before[:2]) is None
    monkeypatch.setattr(liveness, "SLOW_SECONDS", 0.01)
    said: list[str] = []
    told = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        told.set()

    watch = PhaseWatch([{"seconds": {"train": 1e-4, "push": 1e4}}] * 3, tell)
    watch.enter("push")
    watch.enter("train")
    assert told.wait(60) and said == ["the phase `train` has taken 0 s, 6 times its median or more"]
    watch.enter("push")
    watch.end()


def test_a_batch_that_was_set_aside_does_not_go_on_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SLOW_SECONDS", 0.2)
    said: list[str] = []
    usual = [{"seconds": {"prepare": 60.0, "train": 1e-4}}] * 3
    monitor = SimpleNamespace(watch_phases=lambda step: PhaseWatch(usual, said.append))
    reporter = SimpleNamespace(ranks=SimpleNamespace(rank=0), run=SimpleNamespace(monitor=monitor))
    report = StepReport(cast(Reporter, reporter), 3)
    report.leased([])
    report._lap("prepare")
    report.set_aside()
    time.sleep(0.4)
    report.leased([])
    report.watch.end()
    assert said == [] and report.seconds["wait"] >= 0.4


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"figure": "loss"}, "needs one bound; set either above or below"),
        ({"figure": "loss", "above": 1, "below": 0}, "needs one bound; set either above or below"),
        ({"figure": "los", "above": 1}, "reads 'los', which is no figure of a step; docs/training.md has the names"),
        ({"figure": "events/fun", "above": 1}, "reads 'events/fun', which is no figure"),
        ({"figure": "loss", "above": 1, "action": "mask"}, "cannot mask by loss, which no rollout has by itself"),
        (
            {"figure": "reward_mean", "below": 0, "trend": "ratio", "action": "drop_task"},
            r"cannot drop task by reward_mean, which no rollout has by itself \(trend = ratio\)",
        ),
        ({"figure": "loss", "above": 1, "name": "a: b"}, "name = 'a: b'"),
        ({"figure": "loss", "above": 1, "name": "a\n"}, "name = 'a"),
    ],
)
def test_rules_that_cannot_be_are_refused(rule: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        checked({"rule": [{"name": "mine"} | rule]}, MonitorConfig, "monitor")


def test_two_rules_of_one_name_and_a_checkpoint_that_is_gone_are_refused(tmp_path: Path) -> None:
    rule = {"name": "mine", "figure": "loss", "above": 1, "steps": 2, "action": "rollback"}
    with pytest.raises(UserError, match=r"two rules of \[monitor\] have the name 'mine'; rename one"):
        checked({"rule": [rule, rule]}, MonitorConfig, "monitor")
    with pytest.raises(
        UserError, match=r"keep_checkpoints = 2 has deleted the step before .*'mine'.* set it to 3 or more"
    ):
        make_config(tmp_path, monitor={"rule": [rule]})
    assert make_config(tmp_path, monitor={"rule": [rule]}, keep_checkpoints=3).monitor.rule[0].breaks(1.5)


def test_a_rollback_keeps_the_reference_of_the_step_after_it(tmp_path: Path) -> None:
    """An alarm of steps 4 and 5 goes back to step 3, and step 4 then needs the policy of step 2."""
    rule = {"name": "mine", "figure": "loss", "above": 1, "steps": 2, "action": "rollback"}
    options: dict[str, Any] = {"monitor": {"rule": [rule]}, "loss": {"kl": 0.1, "kl_steps_ago": 1}}
    with pytest.raises(UserError, match=r"'mine'.*the reference of the step after it .*ago = 1.* set it to 4 or more"):
        make_config(tmp_path, keep_checkpoints=3, **options)
    make_config(tmp_path, keep_checkpoints=4, **options)
    for kept in (3, 4):
        fewer = msgspec.structs.replace(make_config(tmp_path / str(kept), loss=options["loss"]), keep_checkpoints=kept)
        for step in range(6):
            exported(fewer, step).mkdir(parents=True)
            checkpoint(fewer, step).mkdir(parents=True)
        prune(fewer, 5)
        target = steps.Version(3, 1, 3, str(checkpoint(fewer, 3)), str(exported(fewer, 3)), None, 0.0)
        assert complete(fewer, target) == (kept == 4) and checkpoint(fewer, 3).is_dir()


@pytest.mark.parametrize("finish", ["length", "repetition"])
def test_each_rollout_has_its_own_figures(finish: str) -> None:
    long, short = rollout(1, 0.0, turns=3), rollout(2, 1.0, turns=1)
    cut = replace(short, completions=[replace(short.completions[0], finish_reason=finish)])
    one, other = group(long, cut), replace(group(rollout(3, 0.0), rollout(4, None)), task={"id": "b"})
    one = replace(one, task={"id": "a"})
    own = own_figures([one, other], LABELS)
    assert (own[1]["reward_mean"], own[1]["truncated_share"], own[2]["truncated_share"]) == (0.0, 0.0, 1.0)
    assert (own[1]["negative_length_p99"], own[2]["positive_length_mean"]) == (5.0, 2.0)
    assert own[1]["behaviour/turns"] == 3 and "reward_mean" not in own[4]
    assert lengths([one, other], LABELS)["truncated_share"] == 0.25
    low = Rule(name="low", figure="reward_mean", below=0.5)
    loops = Rule(name="loops", figure="events/retry_loop", below=1)
    assert tasks_that_break([low, loops], [one, other], own) == {"low": ["b"], "loops": ["a", "b"]}


def record(pool: Pool, run_id: int, task: str, members: Sequence[tuple[float, int]], version: str = "v1") -> None:
    """A finished group: (reward, sampled tokens) of each member."""
    opened = open_group(pool, run_id, {"id": task, "domain": "agent"}, len(members))
    for member, (reward, size) in zip(opened, members, strict=True):
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        number = member.rollout_id
        item = new_completion(attempt.id, [number % 90] * 9, [(number * place) % 90 for place in range(size)], version)
        with pool.write() as connection:
            insert_row(connection, completions, to_row(item) | {"ordinal": 0})
        close_attempt(pool, attempt.id, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=reward))


def prepare(directory: Path, steps_: int, rule: dict[str, Any], **changes: Any) -> tuple[Config, Pool, int]:
    write_model(directory / "model")
    options = {"steps": steps_, "report": SILENT, "monitor": {"rule": [rule]}, "keep_checkpoints": 9} | changes
    config = make_config(directory, **options)
    pool = open_pool(config.pool)
    return config, pool, runs.open_run(pool, config.run, "train", None).id


GOOD, BAD = [(1.0, 8), (0.0, 8), (1.0, 8), (0.0, 8)], [(1.0, 8), (0.0, 8), (0.0, 8), (0.0, 8)]


def test_a_collapse_is_taken_back_twice_with_its_batches_and_then_pauses_the_run(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = {"name": "collapse", "figure": "reward_mean", "below": 0.4, "steps": 2, "action": "rollback"}
    config, pool, run_id = prepare(tmp_path, 3, rule)
    for members in (*[GOOD] * 2, *[BAD] * 12, *[GOOD] * 2):
        record(pool, run_id, "t", members)
    train(config, ranks)
    with pool.read() as connection:
        versions = connection.execute(select(policy_versions).order_by(policy_versions.c.id)).all()
        rows = connection.execute(select(groups.c.state, groups.c.reason, groups.c.detail)).all()
    assert [(row.step, row.retired_at is None) for row in versions] == [
        *((0, True), (1, True), (2, False), (3, False), (2, False), (3, False), (2, True), (3, True)),
    ]
    assert Counter(map(tuple, rows)) == {
        ("CONSUMED", None, None): 6,
        ("TOMBSTONE", "discarded", "collapse"): 8,
        ("DONE", None, None): 2,
    }
    assert [(item.action, item.rule) for item in history_of(pool, run_id)] == [
        *[("rollback", "collapse")] * 2,
        ("pause", "collapse"),
    ]
    now = account(pool, run_id)
    assert now.unaccounted == 0 and now.left_out["discarded: collapse"].tokens == 8 * 32
    assert [step for step, _ in shown(config, "loss/loss")] == [1, 2, 3]  # each once, as after a new start
    assert [row["monitor"].get("collapse") for row in steps.metrics(pool, run_id)[1:]] == [0, 1, 2]
    assert "collapse takes the run back to step 1, v2; 4 groups discarded" in noted(pool, "monitor")
    assert paused(pool, run_id).endswith("(again after 2 rollbacks)")

    # A new start waits for a person, and says so; then the next step is trained.
    (tmp_path / "trainer.toml").write_text('pool = "pool.db"\nrun = "demo"\nmodel = "model"\noutput = "trainer"\n')

    def person() -> None:
        other = open_pool(config.pool)
        try:
            while not noted(other, "pause"):
                time.sleep(0.05)
            ended.append(main(["continue", str(tmp_path / "trainer.toml")]))
        finally:
            other.close()

    ended = list[int]()
    helper = threading.Thread(target=person)
    helper.start()
    train(msgspec.structs.replace(config, steps=4), ranks)
    helper.join()
    assert ended == [0] and steps.metrics(pool, run_id)[-1]["step"] == 4
    printed, alarms = capsys.readouterr()
    assert "monitor: collapse pauses the run after" in alarms
    assert "paused by collapse: step 3: collapse = 0.25 is below 0.4, since step 2" in printed
    assert "run demo goes on" in printed and "the pause is over" in printed
    assert main(["continue", "--pool", config.pool, "--run", "demo"]) == 2
    assert "run 'demo' is not paused" in capsys.readouterr().err


def test_rollouts_that_show_it_are_masked_in_the_step_itself_and_count_under_the_rule(
    ranks: Ranks, tmp_path: Path
) -> None:
    rule = {"name": "rambling", "figure": "negative_length_p99", "above": 10, "steps": 1, "action": "mask"}
    config, pool, run_id = prepare(tmp_path, 2, rule)
    record(pool, run_id, "t", [(1.0, 8), (0.0, 8), (1.0, 20), (0.0, 12)])
    for _ in range(3):
        record(pool, run_id, "t", GOOD)
    train(config, ranks)
    [_, first, second] = steps.metrics(pool, run_id)
    assert first["alarms"] == ["rambling"] and second["alarms"] == []
    assert first["excluded_tokens"] == {"monitor: rambling": 12} and first["valid_rollouts"] == 7
    assert first["reward_mean"] == pytest.approx(4 / 7)  # out of the baseline too
    assert first["negative_length_p99"] > 10  # the rule sees on what it masks
    assert account(pool, run_id).left_out["monitor: rambling"].tokens == 12
    with pool.read() as connection:
        reasons = connection.scalars(select(rollouts.c.left_out).order_by(rollouts.c.id)).all()
    assert reasons == [None, None, None, "monitor: rambling", *[None] * 12]


def test_a_rule_that_masks_by_the_reward_stays_in_its_alarm_while_rollouts_show_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The published mean leaves out what is masked, and would end the alarm in the step that began it."""
    rule = {"name": "overpaid", "figure": "reward_mean", "above": 1.2, "steps": 2, "action": "mask"}
    config, pool, run_id = prepare(tmp_path, 4, rule)
    for members in (*[[(5.0, 8), (0.0, 8), (1.0, 8), (0.0, 8)]] * 6, *[GOOD] * 2):
        record(pool, run_id, "t", members)
    train(config, ranks)
    metrics = steps.metrics(pool, run_id)[1:]
    assert [row["monitor"]["overpaid"] for row in metrics] == [1, 2, 2, 2]
    assert [row["alarms"] for row in metrics] == [[], ["overpaid"], ["overpaid"], ["overpaid"]]
    assert [row["excluded_tokens"] for row in metrics] == [{}, *[{"monitor: overpaid": 16}] * 2, {}]
    assert [row["reward_mean"] for row in metrics] == pytest.approx([1.5, 1 / 3, 1 / 3, 0.5])
    assert noted(pool, "alarm") == ["alarm in step 2: overpaid = 1.5 is above 1.2, since step 1: reward_mean"]


def test_a_rule_that_masks_by_the_reward_counts_no_rollout_that_others_left_out(ranks: Ranks, tmp_path: Path) -> None:
    rule = {"name": "overpaid", "figure": "reward_mean", "above": 1.2, "steps": 1, "action": "mask"}
    config, pool, run_id = prepare(tmp_path, 1, rule)
    for members in ([(9.0, 8), (1.0, 8), (0.0, 8)], *[GOOD] * 3):
        record(pool, run_id, "t", members)
    with pool.write() as connection:
        connection.execute(update(rollouts).where(rollouts.c.reward == 9.0).values(set_aside="a cheat"))
    train(config, ranks)
    row = steps.metrics(pool, run_id)[-1]
    assert (row["monitor"]["overpaid"], row["alarms"], row["reward_mean"]) == (0, [], pytest.approx(0.5))


def test_a_task_that_shows_it_is_dropped_with_what_is_queued_of_it(ranks: Ranks, tmp_path: Path) -> None:
    rule = {"name": "hopeless", "figure": "reward_mean", "below": 0.4, "steps": 1, "action": "drop_task"}
    config, pool, run_id = prepare(tmp_path, 2, rule)
    for task, members in (("a", GOOD), ("b", BAD), ("a", GOOD), ("b", GOOD), ("a", GOOD)):
        record(pool, run_id, task, members)
    train(config, ranks)
    assert [(item.action, item.task) for item in history_of(pool, run_id)] == [("drop_task", "b")]
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.step, groups.c.reason, groups.c.detail).order_by(groups.c.id)).all()
    assert list(map(tuple, rows)) == [
        (1, None, None),
        (1, None, None),
        (2, None, None),
        (None, "discarded", "hopeless"),
        (2, None, None),
    ]
    assert open_group(pool, run_id, {"id": "b"}, 4) == []
