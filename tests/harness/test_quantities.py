"""When two mathematical answers are the same, and when that is beyond what is compared."""

from fractions import Fraction

import pytest

from harness.verdict.quantities import same, value


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
        ("7\\text{ apples}", "7apples"),
        ("\\left( 1, \\frac{4}{2} \\right)", "(1,2)"),
        ("[0, 1)", "[0,1)"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("90^\\circ", "90"),
        ("x^2 + 1", "x^2+1"),
        ("−3", "-3"),
        (".5", "0.5"),
    ],
)
def test_the_same(answer: str, right: str) -> None:
    assert same(answer, right) and same(right, answer)


@pytest.mark.parametrize(
    "answer, right",
    [
        ("41", "42"),
        ("0.33", "1/3"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        ("1/0", "0"),
        ("", "0"),
        ("2(x+1)", "2x+2"),
        ("9" * 200, "9" * 199),
        ("1e999999999", "1e999999998"),
        ("(" * 500, "42"),
    ],
)
def test_not_the_same(answer: str, right: str) -> None:
    assert not same(answer, right) and not same(right, answer)


def test_no_answer_takes_long_to_read() -> None:
    assert value("1e999") == Fraction(10) ** 999
    assert value("1e9999") is None and value("1" * 101) is None
