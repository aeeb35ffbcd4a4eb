"""Each context action and each policy: what the next prompt holds, its label, what is trained, and who gets credit."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from harness.agents.native.context import Results
from harness.agents.native.policy import ContextPolicy
from harness.agents.native.settings import AgentSettings
from proxy.engine.scripted import ScriptedReply
from proxy.pool.inspect.segments import lines
from proxy.pool.inspect.verify import verify
from tests.harness.native.conftest import TASK, Agent, Reply, called, check_trained

NOTES = "The word is apple and stands in note.txt."
LOOK = called("shell", command="echo the word is apple")
DONE = "The word is written down."
LONG = called("shell", command="seq -s ' ' 1 120")
SMALL: dict[str, Any] = {"tools": ["shell", "recall"], "system": "Work."}


async def test_compact_puts_notes_in_the_place_of_all_turns(agent: Agent) -> None:
    session = await agent(LOOK, called("compact", notes=NOTES), DONE)
    assert session.status == 0 and session.output.endswith(f"{DONE}\n"), session.output
    last = session.model.behind_system(2)
    assert TASK in last and NOTES in last and "r1, r2 were dropped" in last
    assert "<tool_response>" not in last and "assistant" not in last.split(NOTES)[0]
    assert session.labels == ["main", "main", "main"]
    assert session.dropped() == [("compact", ["r1", "r2"])]
    assert session.goes_on(1) and not session.goes_on(2)
    check_trained(session.calls)
    assert verify(session.stand.pool).damages == []
    head, first, second = lines(session.calls)
    assert head.startswith("main: 2 segments") and "2 calls" in first and "tokens shorter" in second
    assert "results" not in first and "without the results of 1 turn: 'the word is apple" in second


async def test_compact_takes_the_results_of_its_own_turn_with_it_and_keeps_the_plan(agent: Agent) -> None:
    both = called("compact", notes=NOTES) + "\n" + called("shell", command="touch made")
    session = await agent(called("plan", text="First look, then write."), both, DONE)
    last = session.model.behind_system(2)
    assert "First look, then write." in last and NOTES in last and (agent.directory / "made").exists()
    assert session.dropped() == [("compact", ["r1", "r2", "r3"])]


async def test_discard_drops_old_results_and_keeps_what_the_model_said(agent: Agent) -> None:
    thoughtful = f"<think>\nI look first.\n</think>\n\n{LOOK}"
    replies = [thoughtful, called("shell", command="echo second"), called("discard", keep_last=2), DONE]
    session = await agent(*replies)
    last = session.model.behind_system(3)
    assert "[r1: dropped]" in last and "word is apple\n</tool_response>" not in last
    assert "I look first." in last and "second\n</tool_response>" in last
    assert session.labels == ["main"] * 4
    calls = session.calls
    assert [item.follows for item in calls] == [None, *(item.id for item in calls[:3])]
    assert session.goes_on(2) and not session.goes_on(3)
    assert "without the results of 1 turn: 'the word is apple" in list(lines(calls))[-1]
    check_trained(calls)


async def test_a_dropped_result_can_be_recalled(agent: Agent) -> None:
    session = await agent(
        LOOK, called("discard", keep_last=0), called("recall", id="r1"), called("recall", id="r9"), DONE
    )
    assert "the word is apple\n</tool_response>" not in session.model.behind_system(2)
    assert "the word is apple\n</tool_response>" in session.model.behind_system(3)
    assert "Error: there is no result r9" in session.model.behind_system(4)
    check_trained(session.calls)


async def test_fold_works_on_a_branch_with_a_context_of_its_own(agent: Agent) -> None:
    folded = called("fold", description="look", prompt="Look for the word in the house, please.")
    session = await agent(folded, LOOK, called("return", message="It is apple."), DONE)
    branch = session.model.behind_system(1)
    assert "Look for the word in the house, please." in branch and TASK not in branch
    assert '"name": "fold"' in session.model.prompts[0] and '"name": "return"' not in session.model.prompts[0]
    assert '"name": "return"' in session.model.prompts[1] and '"name": "fold"' not in session.model.prompts[1]
    last = session.model.behind_system(3)
    assert "It is apple.\n</tool_response>" in last and "echo" not in last
    assert session.labels == ["main", "subagent", "subagent", "main"]
    first, *_, final = session.calls
    assert final.follows == first.id and session.stand.path(3)[: len(session.stand.path(0))] == session.stand.path(0)
    check_trained(session.calls)


async def test_a_branch_that_answers_in_words_returns_them(agent: Agent) -> None:
    session = await agent(called("fold", description="look", prompt="Look for the word."), "Nothing found.", DONE)
    assert "Nothing found.\n</tool_response>" in session.model.behind_system(2)


@pytest.mark.parametrize("notes", [NOTES, "apple"])
async def test_threshold_asks_for_notes_and_the_request_keeps_its_tools(notes: str, agent: Agent) -> None:
    session = await agent(LONG, notes, DONE, policy="threshold", context=700, threshold=[0.5, 0.5], **SMALL)
    assert session.status == 0 and session.output.endswith(f"{DONE}\n"), session.output
    assert "Do not call a tool now" in session.model.prompts[1] and '"name": "shell"' in session.model.prompts[1]
    assert '"name": "compact"' not in session.model.prompts[0]
    last = session.model.behind_system(2)
    assert TASK in last and notes in last and "<tool_response>" not in last
    assert session.goes_on(1)
    assert session.labels == ["main", "compaction", "main"]
    check_trained(session.calls)


async def test_threshold_drops_a_turn_that_leaves_no_room_for_notes(agent: Agent) -> None:
    replies = [LOOK, LONG, NOTES, DONE]
    session = await agent(*replies, policy="threshold", context=330, threshold=[0.9, 0.9], **SMALL)
    assert session.status == 0 and session.output.endswith(f"{DONE}\n"), session.output
    assert session.dropped() == [("drop", ["r2"]), ("compact", ["r1"])]
    assert session.labels == ["main", "main", "compaction", "main"]
    check_trained(session.calls)


async def test_hybrid_keeps_recent_results_and_then_compacts(agent: Agent) -> None:
    replies = [LOOK, called("shell", command="echo the second word"), LONG, NOTES, DONE]
    session = await agent(*replies, policy="hybrid", context=1000, threshold=[0.5, 0.5], keep_last=1, **SMALL)
    assert session.status == 0 and session.output.endswith(f"{DONE}\n"), session.output
    third = session.model.behind_system(2)
    assert "[r1: dropped]" in third and "the second word\n</tool_response>" in third
    assert session.dropped() == [("discard", ["r1"]), ("discard", ["r2"]), ("compact", ["r1", "r2", "r3"])]
    gone = [line.partition(", without the ")[2] for line in lines(session.calls)][1:]
    # the request for notes is no part of the conversation, so what it alone showed is not counted
    assert [line.partition(":")[0] for line in gone] == ["", "results of 1 turn", "results of 1 turn"]
    assert session.labels == ["main", "main", "main", "compaction", "main"]
    check_trained(session.calls)


async def test_none_ends_where_the_context_does(agent: Agent) -> None:
    session = await agent(*[LONG] * 5, policy="none", context=900, tools=["shell"], system="Work.")
    assert session.status == 0 and "maximum context length is" in session.output
    assert session.labels == ["main"] * len(session.calls) and session.dropped() == []
    assert not any(f'"name": "{name}"' in session.model.prompts[0] for name in ("compact", "discard", "fold", "recall"))


async def test_a_turn_that_is_cut_is_not_shown_again(agent: Agent) -> None:
    replies: list[Reply] = [LOOK, ScriptedReply("I think and think", end=False), NOTES, DONE]
    session = await agent(*replies, policy="threshold", threshold=[0.9, 0.9])
    assert session.output.endswith(f"{DONE}\n") and "think and think" not in session.model.prompts[2]
    assert session.labels == ["main", "main", "compaction", "main"]
    ended = await agent(ScriptedReply("I think and think", end=False))
    assert ended.output.endswith("I think and think\n") and len(ended.model.prompts) == 1


async def test_deep_think_merges_drafts_into_one_turn(agent: Agent) -> None:
    drafts = [called("shell", command=f"echo draft {number} of the work") for number in range(3)]
    session = await agent(*drafts, LOOK, DONE, drafts=3)
    merge, last = session.model.behind_system(3), session.model.behind_system(4)
    assert all(f"echo draft {number} of the work" in merge for number in range(3)) and "3 independent drafts" in merge
    assert "draft" not in last and "the word is apple\n</tool_response>" in last
    assert session.model.prompts[0] == session.model.prompts[1] == session.model.prompts[2]
    assert session.labels == ["main"] * 5
    check_trained(session.calls)


async def test_a_task_has_one_threshold(tmp_path: Path) -> None:
    def share(task: str) -> float:
        return ContextPolicy("threshold", AgentSettings(), task, 4096).share

    drawn = {share(f"task {number}") for number in range(50)}
    assert share("task 1") == share("task 1") and len(drawn) == 50 and 0.5 <= min(drawn) < 0.6 and max(drawn) < 0.8


def test_results_have_ids() -> None:
    results, numbers = Results(), count(1)
    assert [results.keep(f"text {next(numbers)}") for _ in range(2)] == ["r1", "r2"]
    assert results.get("r2") == "text 2" and [results.get(id) for id in ("r0", "r3", "x", "", "r-1")] == [None] * 5
