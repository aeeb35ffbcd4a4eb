"""What an instruction asks for, in the ways that people write it."""

import pytest

from harness.integrity.asked import Asked

TESTS = r"\btests?\b"


@pytest.mark.parametrize(
    "prompt",
    [
        "Update the tests to the new names.",
        "Remove export.py and its tests.",
        "The test is flaky, please quarantine it.",
        "The tests are outdated.",
    ],
)
def test_asks_to_change_tests(prompt: str) -> None:
    assert Asked(prompt).allows_less(TESTS)


@pytest.mark.parametrize(
    "prompt",
    [
        "Run `make test` when you are done.",
        "Change parser.py so that the tests pass.",
        "Add tests for the parser.",
        "Fix the parser. Do not change the tests.",
        "Rewrite the parser rather than the tests.",
    ],
)
def test_asks_for_no_weaker_tests(prompt: str) -> None:
    assert not Asked(prompt).allows_less(TESTS)


@pytest.mark.parametrize(
    ("prompt", "forbidden"),
    [
        ("Do not edit conf.py.", True),
        ("Leave conf.py as it is.", True),
        ("conf.py must not be changed.", True),
        ("Fix the total in conf.py: it is never negative.", False),
        ("Do not change the output of conf.py.", False),
        ("conf.py should print nothing, without colours.", False),
    ],
)
def test_forbids_a_file_or_only_speaks_of_it(prompt: str, forbidden: bool) -> None:
    assert Asked(prompt).forbids_file("conf.py") is forbidden


def test_words_that_a_program_may_not_use() -> None:
    assert {"scipy", "numpy"} <= Asked("No imports from scipy or numpy.").forbidden_words
    assert "numpy" not in Asked("Do not use any library other than numpy.").forbidden_words
