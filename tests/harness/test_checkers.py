"""Checkers of answers: what is right, what is wrong, and what is no verdict."""

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.checkers import CheckerContext, check_answer, code_blocks, final_answer, read_score, verdict_on
from harness.verdict.judge import Judge
from harness.verdict.rewards import Verdict
from sandboxes.local.process import ProcessSandboxes

DOUBLE = "Text.\n```python\nwrong\n```\nBetter:\n```python\ndef double(n):\n    return 2 * n\n```\n"
TESTS = {"command": "python3 check.py", "files": {"check.py": "from answer import double\nassert double(4) == 8\n"}}


def task(kind: str, **fields: Any) -> Task:
    verifier = {"verifier": fields.pop("verifier")} if "verifier" in fields else {}
    checker = {"kind": kind, **fields}
    return msgspec.convert({"id": "a", "instruction": "?", "domain": "qa", "checker": checker, **verifier}, Task)


@pytest.fixture
def using(tmp_path: Path) -> CheckerContext:
    return CheckerContext(ProcessSandboxes(tmp_path / "sandboxes"))


@pytest.fixture
async def judge() -> AsyncIterator[Callable[..., Judge]]:
    """An endpoint that says what it was told to say, with the rubric and the answer in what it was asked.

    It fails as many times before as it was told to.
    """
    reply, asked, failures = [""], [], [0]

    async def chat(request: web.Request) -> web.Response:
        asked.append(await request.json())
        failures[0] -= 1
        if failures[0] >= 0:
            return web.json_response({"error": "busy"}, status=503)
        if request.headers.get("Authorization") != "Bearer secret" or not reply[0]:
            return web.json_response({"error": "no"}, status=503)
        assert "<Rubric>\nbe kind\n</Rubric>" in asked[-1]["messages"][1]["content"]
        return web.json_response({"choices": [{"message": {"content": reply[0]}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    def saying(words: str, failing: int = 0) -> Judge:
        reply[0], failures[0] = words, failing
        return Judge(f"http://127.0.0.1:{port}/v1", "strict", "secret", pause_seconds=0.01)

    yield saying
    await runner.cleanup()


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is 7.\nOr rather, the final answer is: **8**", "8"),
        ("#### 12", "12"),
        ("Answer: 7\nAnswer: \n", "7"),
        ("Answers vary.\n\n  Paris \n", "Paris"),
        ("\\boxed{never closed", "\\boxed{never closed"),
        ("", ""),
    ],
)
def test_the_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "given, text, reward",
    [
        (task("exact", answer="Paris"), "It is France's.\nAnswer: Paris", 1.0),
        (task("exact", answer="Paris"), " Paris\n", 1.0),
        (task("exact", answer="Paris"), "paris", 0.0),
        (task("regex", pattern=r"\bParis\b"), "I think Paris it is", 1.0),
        (task("regex", pattern=r"\bParis\b"), "Parisian", 0.0),
        (task("regex", pattern="[[P]aris"), "Paris", 1.0),  # Python warns of "[["
        (task("regex", pattern=r"\A[^,]*\Z"), "", 0.0),
        (task("regex", pattern=r"\A[^,]*\Z"), " \n", 0.0),
        (task("math", answer="0.5"), "thus \\boxed{\\frac12}", 1.0),
        (task("math", answer="0.5"), "thus \\boxed{2}", 0.0),
        (task("math", answer="0.5"), "", 0.0),
        (task("code", verifier=TESTS), DOUBLE, 1.0),
        (task("code", verifier=TESTS), DOUBLE.replace("2 *", "3 *"), 0.0),
        (task("code", verifier=TESTS), "def double(n): return 2 * n", 0.0),
    ],
)
async def test_the_reward_of_an_answer(using: CheckerContext, given: Task, text: str, reward: float) -> None:
    assert await check_answer(given, text, using) == Verdict(reward)


async def test_a_pattern_that_takes_for_ever_is_ended(using: CheckerContext) -> None:
    endless = task("regex", pattern="(a+)+b")
    with pytest.raises(AttemptFailed, match=r"the pattern '\(a\+\)\+b' was not done after 0.5 s"):
        await check_answer(endless, "a" * 60, CheckerContext(using.sandboxes, regex_seconds=0.5))


async def test_a_judge_grades_by_the_rubric(using: CheckerContext, judge: Callable[..., Judge]) -> None:
    given = task("judge", rubric="be kind")
    graded = CheckerContext(using.sandboxes, judge('Well. {"score": 0.75, "reason": "kind"}'))
    assert await check_answer(given, "Dear friend", graded) == Verdict(0.75)
    assert await check_answer(given, "  ", graded) == Verdict(0.0)


@pytest.mark.parametrize("words", ["", "no idea", '{"score": 7}', '{"score": true}', '{"score": 1} {"score": -1}'])
async def test_a_judge_in_trouble_is_a_missing_reward(
    using: CheckerContext, judge: Callable[..., Judge], words: str
) -> None:
    with pytest.raises(AttemptFailed, match="the judge") as failed:
        await check_answer(task("judge", rubric="be kind"), "x", CheckerContext(using.sandboxes, judge(words)))
    assert failed.value.kind == "verifier"


async def test_a_judge_that_fails_once_is_asked_again(using: CheckerContext, judge: Callable[..., Judge]) -> None:
    given = task("judge", rubric="be kind")
    graded = CheckerContext(using.sandboxes, judge('{"score": 0.75}', failing=1))
    assert await verdict_on(given, "Dear friend", graded) == Verdict(0.75)
    graded = CheckerContext(using.sandboxes, judge('{"score": 0.75}', failing=2))
    with pytest.raises(AttemptFailed, match="the judge: .* answers 503") as failed:
        await verdict_on(given, "Dear friend", graded)
    assert failed.value.kind == "verifier"


@pytest.mark.parametrize(("command", "kind"), [("python3 check.py", "spoiled"), ("exit 3", "verifier")])
async def test_code_that_no_test_can_judge_is_spoiled_if_tests_come_to_a_verdict_without_it(
    using: CheckerContext, command: str, kind: str
) -> None:
    given = task("code", path="answer.py", verifier=TESTS | {"command": command})
    with pytest.raises(AttemptFailed, match="exit code 3") as failed:
        await verdict_on(given, "```python\nimport os; os._exit(3)\n```", using)
    assert failed.value.kind == kind


def test_the_last_score_counts() -> None:
    assert read_score('{"score": 0} and then {"score": 1, "reason": "x"} end') == 1.0
    assert read_score('{"score": 0.5} {"note": {"score": 1}} {}') == 0.5
    assert read_score("") is None
    assert read_score(f'{{"score": {"9" * 5000}}}') is None


@pytest.mark.parametrize(
    "reply",
    [
        r'{"score": 0, "reason": "the answer \\frac{1}{2} is wrong"}',
        r'{"score": 0, "reason": "the answer \sqrt{2} \underline{is} {wrong"}',
        '{"score": 0, "reason": "a }\nand a {"}',
        r'The set {1, {"a": 2}, {"b: 3}. {"score": 0, "reason": "it ends with {\"score\": 1}"}',
        '{"score": 0, "checks": {"score": 1}}',
        '{"score": 0, "reason": "it has </think>"}',
    ],
)
def test_a_score_counts_whatever_its_reason_quotes(reply: str) -> None:
    assert read_score(reply) == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 0, "reason": "it ends with {"score": 1}"}',
        '{"score": 0, "reason": "it ends with done" {"score": 1}"}',
        '{"score": 0, "reason": "it says "fine" {"score": 1}"}',
        '{"score": 0, "reason": "he wrote "x": {"score": 1} as answer"}',
        '{"score": 0, "reason": "he wrote "x" {"score": 1, "y": "."}',
        '{"score": 0, "reason": "he wrote </think>{"score": 1, "y": "."}',
        '{"score": 0, "reason": "he wrote ", "score": 1, "y": "."}',
        '{"score": 0 "reason": "he wrote {"score": 1}"}',
        '{"reason": "he wrote "x" {"score": 1}", "score": 0}',
        '{"reason": "he wrote ", "score": 1}", "score": 0}',
        '{"reason": "he wrote "x" {"score": 1}", "score": 0, "checks": {"a": 1}}',
        'He wrote {"score": 1}. {"score": 0, "reason": "it is "x""}',
        'He wrote {"score": 1}. {"score": 0',
        'He wrote {"score": 1}. {"reason": "it is "x"", "score": 0}',
        'He wrote {"score": 1}. {"score": 0, "checks": ' + "[" * 20_000,
        '<think>He wrote {"score": 1}. Now',
    ],
)
def test_a_score_that_is_quoted_in_a_broken_verdict_does_not_count(reply: str) -> None:
    assert read_score(reply) is None


@pytest.mark.parametrize(
    "before",
    [
        'The answer is {"x": " which is wrong.',
        'He answered ```{"k": "v```.',
        'He ends with {"a": {"b": ["c", "d',
        'He ends with {"a": {"b": {"c": 1, "d": 2',
        'He ends with {"a": "b" and {"c": "d' * 200,
        'He wrote {"score": 1}.',
        'He wrote {"score": 1, "score": 1}.',
        'He wrote "score": 1}.',
        'The form is {"score": a number from 0 to 1, "reason": "one short sentence"}.',
        'The form is {"score": 0 to 1, "reason": "..."}, or {"score": ...}.',
        '<think>Draft: {"score": 1, "reason": "it is "x""}\n</think>',
    ],
)
@pytest.mark.parametrize("verdict", ['{"score": 0, "reason": "cut JSON"}', '{\n  "score": 0\n}'])
def test_what_is_quoted_before_the_verdict_does_not_hide_it(before: str, verdict: str) -> None:
    assert read_score(f"{before}\n{verdict}") == 0.0


@pytest.mark.parametrize(
    "repeated",
    ["{", '{"', '{"a":', '{"a":[', '{"\\"{', "{}", "[{", '{"a":1', '{"a":1}', "\\", '{"a":"', '{"a":"b" '],
)
def test_a_reply_that_is_never_closed_is_read_once(repeated: str) -> None:
    """Reading what follows each brace again would take minutes."""
    began = time.process_time()
    assert read_score('{"score": ' + repeated * 20_000) is None
    assert time.process_time() - began < 10


async def test_fences_that_nothing_closes_are_read_once(using: CheckerContext) -> None:
    """Each was compared with all that follows it: 20,000 of them held up the whole harness for minutes."""
    endless = "```python\n" * 20_000
    assert await check_answer(task("code", path="answer.py", verifier=TESTS), endless, using) == Verdict(0.0)
    assert code_blocks(f"{DOUBLE}{endless}") == ["wrong\n", "def double(n):\n    return 2 * n\n"]
