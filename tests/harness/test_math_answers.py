"""When two mathematical answers are the same, and what an answer that is too expensive to compare gets."""

import resource
import signal
import subprocess
import sys
import time

import pytest

from harness.failure import AttemptFailed
from harness.verdict import math_answers
from harness.verdict.math_answers import equal, is_same


@pytest.mark.parametrize(
    "answer, right",
    [
        ("42", "42.0"),
        ("\\frac{1}{2}", "0.5"),
        ("$\\dfrac12$", "1/2"),
        ("-\\frac{3}{6}", "-0.5"),
        ("50\\%", "0.5"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("5 \\times 10^{-1}", "0.5"),
        ("1.5e3", "1500"),
        ("x = 7", "7"),
        ("7.", "7"),
        ("7\\text{ apples}", "7apples"),
        ("\\left( 1, \\frac{4}{2} \\right)", "(1,2)"),
        ("[0, 1)", "[0,1)"),
        ("\\left\\{ 1, 2 \\right\\}", "\\{2, 1\\}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("90^\\circ", "90"),
        ("x^2 + 1", "x^2+1"),
        ("2(x+1)", "2x+2"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("−3", "-3"),
        (".5", "0.5"),
        ("7\\text{ m}", "7 meters"),
        ("12 cm^2", "12\\text{ square centimeters}"),
        ("3 m/s", "3\\text{ meters per second}"),
        ("12\\text{ square units}", "12\\text{ units}^2"),
        ("12 cm squared", "12\\text{ sq cm}"),
        ("3 s^3 m^2", "3 m^2 s^3"),
        ("3\\text{ cubic meters per square second}", "3 m^3/s^2"),
        ("5\\text{ hours}", "5"),
        ("2 days", "2\\text{ day}"),
        ("\\$5", "5 dollars"),
        ("42\\text{ percent}", "0.42"),
        ("x = 3 + 4 = 7", "7"),
        ("\\angle ABC = 90^\\circ", "90"),
        ("a_1 + b = 5", "5"),
        ("x \\in [0,1)", "[0,1)"),
        ("x=1,y=2", "x=1, y=2"),
    ],
)
def test_the_same(answer: str, right: str) -> None:
    assert equal(answer, right) and equal(right, answer)


@pytest.mark.parametrize(
    "answer, right",
    [
        ("41", "42"),
        ("0.33", "1/3"),
        ("0.3333333", "1/3"),
        ("3.1415926", "\\pi"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        ("1/0", "0"),
        ("", "0"),
        ("x", "y"),
        ("41 or 42", "42"),
        ("1} \\boxed{42", "42"),
        ("\\boxed{1} \\boxed{42}", "42"),
        ("9" * 200, "9" * 199),
        ("7 meters", "7 seconds"),
        ("7 m/s", "7 s/m"),
        ("7 m^2 s^3", "7 m^3 s^2"),
        ("7\\text{ square meter seconds}", "7\\text{ meter seconds squared}"),
        ("7m", "7s"),
        ("42^\\circ", "42 dollars"),
        ("5\\%", "5"),
        ("42 % 100", "42"),
        ("1=2=42", "42"),
        ("1=2=42, 42", "42"),
        ("1=2=x=7", "x=7"),
        ("5=42", "42"),
        ("5=42", "x=42"),
        ("2x=42", "42"),
        ("x = y = 7", "y = 7"),
        ("42\\text{ or 43}", "42"),
        ("42\\text{ or forty-three}", "42"),
        ("5\\text{ hours and }3\\text{ minutes}", "5"),
    ],
)
def test_not_the_same(answer: str, right: str) -> None:
    assert not equal(answer, right) and not equal(right, answer)


async def test_one_candidate_that_is_right_is_enough() -> None:
    assert await is_same(["41", "0.5"], "1/2") and not await is_same(["41", "40"], "1/2")


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "1e999999999", "(" * 500])
async def test_an_answer_that_is_too_expensive_is_wrong(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "CPU_SECONDS", 1)
    assert not await is_same([answer], "42")


def test_a_comparison_has_the_seconds_that_it_was_given() -> None:
    """The limit must come from the argument: the child does not have this process's constant."""
    code = "import harness.verdict.math_answers as m; m.compare(['9999999!'], '42', 3, m._PROCESSES.Pipe()[1])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGXCPU, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 4


async def test_a_comparison_that_does_not_end_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "WALL_SECONDS", 0.0)
    with pytest.raises(AttemptFailed, match="comparing with '42' took longer than 0 s"):
        await is_same(["10^{10^{10}}"], "42")


async def test_what_the_policy_writes_is_never_evaluated_as_python() -> None:
    began = time.monotonic()
    assert not await is_same(["1+__import__('time').sleep(600)"], "42")
    assert time.monotonic() - began < 300
