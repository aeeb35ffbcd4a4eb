"""Reward files: what is a reward, what is none, and how steps come to one."""

from collections.abc import Mapping

import pytest

from harness.failure import AttemptFailed
from harness.verdict.rewards import NoReward, Verdict, below, from_json, from_text, joined


@pytest.mark.parametrize(
    "text, verdict",
    [
        ("0.5", Verdict(0.5, {})),
        ('{"reward": 1, "style": 0.25}', Verdict(1.0, {"style": 0.25})),
        ('{"accuracy": 0.75}', Verdict(0.75, {"accuracy": 0.75})),
        ('{"reward": true}', Verdict(1.0, {})),
    ],
)
def test_a_reward_file_of_json(text: str, verdict: Verdict) -> None:
    assert from_json(text.encode(), "reward.json") == verdict


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "reward.json is no JSON"),
        ("[1]", "reward.json holds no finite number for 'reward': [1]"),
        ('{"reward": "1"}', "holds no finite number for 'reward': 1"),
        ('{"reward": NaN}', "reward.json is no JSON"),
        ('{"reward": 1' + 400 * "0" + "}", "holds no finite number for 'reward': 1000"),
        ('{"reward": 1e999}', "reward.json is no JSON (Number out of range"),
        ('{"reward": ' + 20_000 * "[" + 20_000 * "]" + "}", "reward.json is no JSON (maximum recursion depth"),
        (r'{"reward": 1, "\ud800": 0}', "reward.json is no JSON"),
        (b'{"reward": 1, "\xed\xa0\x80": 0}', "reward.json is no JSON"),
        ('{"reward": 1, "turn:' + 5000 * "9" + '": 1}', "a name of 5005 characters, and at most 200 are taken"),
        (r'{"reward": 1, "a\u0000b": 0}', r"a name that is not printable: 'a\x00b'"),
        ('{"a": 1, "b": 0}', "names ['a', 'b'] and no 'reward'"),
        ("{}", "names [] and no 'reward'"),
    ],
)
def test_no_reward_is_told_and_never_made_up(text: str | bytes, sentence: str) -> None:
    with pytest.raises(NoReward) as raised:
        from_json(text if isinstance(text, bytes) else text.encode(), "reward.json")
    assert sentence in str(raised.value)


def test_a_text_file_is_one_number() -> None:
    assert from_text(b" 0.25\n", "reward.txt") == Verdict(0.25)
    for text in (b"", b"good", b"inf", b"1 2"):
        with pytest.raises(NoReward, match="reward.txt holds no finite number"):
            from_text(text, "reward.txt")


@pytest.mark.parametrize(
    "least, short",
    [(None, False), (0.5, False), (0.51, True), ({"tests": 1}, False), ({"tests": 1, "style": 0}, True)],
)
def test_a_step_falls_short_of_its_least_reward(least: float | Mapping[str, float] | None, short: bool) -> None:
    assert below(Verdict(0.5, {"tests": 1}), least) is short


def test_the_verdict_on_steps_is_their_mean_or_the_last() -> None:
    steps = [("one", Verdict(1.0)), ("two", Verdict(0.0, {"style": 1})), ("three", Verdict(0.5))]
    parts = {"step:one": 1.0, "step:two": 0.0, "step:three": 0.5, "step:two:style": 1.0}
    assert joined(steps, "mean") == Verdict(0.5, parts)
    assert joined(steps[:2], "final") == Verdict(0.0, {"step:one": 1.0, "step:two": 0.0, "step:two:style": 1.0})


def test_rewards_of_turns_keep_their_name_over_the_steps() -> None:
    steps = [("one", Verdict(1.0, {"turn:0": 0.5, "turn:1": 0.25})), ("two", Verdict(1.0, {"turn:1": 0.5}))]
    parts = joined(steps, "mean").parts
    assert parts == {"step:one": 1.0, "step:two": 1.0, "turn:0": 0.5, "turn:1": 0.75}
    huge = Verdict(1.0, {"turn:0": 1e308})
    with pytest.raises(AttemptFailed, match="the steps' rewards of 'turn:0' have no finite sum"):
        joined([("one", huge), ("two", huge)], "mean")
