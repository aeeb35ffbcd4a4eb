"""The shell that agents of SDKs have: whatever the model writes, it gets a text back, and soon."""

import time

import pytest

from harness.agents.sdk.programs.common import SHOWN, shell
from proxy.pool.behaviour.actions import Action
from proxy.pool.behaviour.results import failure
from proxy.pool.completions.observed import ToolResult


def test_output_and_exit_code_are_told_as_behaviour_reads_them() -> None:
    assert shell("echo out; echo err >&2") == "out\nerr\n\n[exit code: 0]"
    told = shell("frob")
    result = ToolResult(call="c", name="shell", head=told[:300], tail=told[-200:] if told[300:] else "", size=len(told))
    assert failure(Action(1, 0, "shell", '{"command": "frob"}', results=(result,))) == "exit code 127"


def test_of_a_long_output_both_ends_are_told() -> None:
    told = shell("seq 1 1000000")
    assert told.startswith("1\n2\n3\n") and told.endswith("999999\n1000000\n\n[exit code: 0]")
    assert "bytes are left out]" in told and len(told) < 2 * SHOWN + 100


def test_what_stays_in_the_background_is_not_waited_for() -> None:
    began = time.monotonic()
    assert shell("sleep 20 & echo on") == "on\n\n[exit code: 0]"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("command", ["echo \0", "echo " + "x" * 200_000, "echo \ud800"])
def test_a_command_that_no_machine_can_run_is_a_text(command: str) -> None:
    assert shell(command).startswith("[the command cannot be run: ")
