"""What `proxy pool show` prints of the results of tools: the part that is recorded, as text that no terminal obeys."""

from dataclasses import replace
from typing import Any

from proxy.pool.completions.labels import SIDE
from proxy.pool.completions.observed import Observed, ToolResult
from proxy.pool.completions.records import RequestShape
from proxy.pool.database import Pool
from proxy.pool.inspect.show import show
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from tests.pool.behaviour.work import Failed, Work
from tests.pool.make import TASK, new_completion, record


def attempt_of(pool: Pool, *turns: tuple[dict[str, Any], Observed | None], linked: bool = True, **more: Any) -> int:
    """An attempt of these replies, each with what its request showed. `more`: fields of the completions."""
    [member] = open_group(pool, open_run(pool, "r", "collect", {}).id, TASK, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    before = None
    for reply, seen in turns:
        new = replace(new_completion(attempt.id), reply=reply, observed=seen, follows=before, **more)
        [id] = record(pool, [new])
        before = id if linked else None
    return attempt.id


def shown(pool: Pool, *turns: tuple[dict[str, Any], Observed | None], linked: bool = True) -> list[str]:
    """The lines about results."""
    lines = show(pool, attempt_of(pool, *turns, linked=linked))
    return [line.strip() for line in lines if line.startswith(" ") and "segment" not in line]


def of_work(work: Work) -> list[tuple[dict[str, Any], Observed | None]]:
    return [(row.reply, row.observed) for row in work.rows]


def calls(*ids: str) -> dict[str, Any]:
    """A reply that calls tools by these ids."""
    made = [{"id": id, "function": {"name": f"tool{place}", "arguments": "{}"}} for place, id in enumerate(ids, 1)]
    return {"role": "assistant", "content": None, "tool_calls": made}


def seen(*results: ToolResult) -> Observed:
    return Observed(results=results)


DONE = {"role": "assistant", "content": "done"}


def test_each_call_is_followed_by_what_its_tool_answered(pool: Pool) -> None:
    work = Work().turn(("bash", {"command": "ls"}, "a.py\nb.py"), ("read", {"filePath": "a"}, Failed("no such file")))
    work.shell("cat log", answer="a" * 400 + "b" * 5000 + "c" * 150).shell("true").shell("make", answer=None)
    assert shown(pool, *of_work(work)) == [
        "result of bash, 9 characters: a.py b.py",
        "result of read, 12 characters, flagged as an error: no such file",
        f"result of bash, 5550 characters: {'a' * 300} [5050 characters not kept] {'b' * 50}{'c' * 150}",
        "result of bash, 0 characters",
        "result of bash is not known",
    ]


def test_a_text_of_which_both_ends_are_kept_and_all_is_there_has_no_mark(pool: Pool) -> None:
    work = Work().shell("cat log", answer="a" * 300 + "b" * 200)
    assert shown(pool, *of_work(work.done())) == [f"result of bash, 500 characters: {'a' * 300}{'b' * 200}"]


def test_no_result_controls_the_terminal_or_makes_lines_of_its_own(pool: Pool) -> None:
    text = "red \x1b[31m\x1b]0;title\x07\x9b2J\r\n#9 follows #1\u202etxt\x00"
    results = [ToolResult(id, "bash\x1b[2J", text, size=99) for id in "az"]
    lines = show(pool, attempt_of(pool, (calls("a"), None), (DONE, seen(*results))))
    assert all(line.isprintable() for line in lines)
    kept = f"99 characters: red  [31m ]0;title  2J #9 follows #1 txt  [{99 - len(text)} characters not kept]"
    assert [line for line in lines if "99 characters" in line] == [
        f"  result of tool1, {kept}",
        f"  result of bash [2J, whose call is not known, {kept}",
    ]


def test_a_result_of_which_only_the_size_is_kept_has_no_words(pool: Pool) -> None:
    result = ToolResult("a", "", "", size=700)
    half = ToolResult("b", "", "half", size=700)
    assert shown(pool, (calls("a", "b"), None), (DONE, seen(result, half))) == [
        "result of tool1, 700 characters: [700 characters not kept]",
        "result of tool2, 700 characters: half [696 characters not kept]",
    ]


def test_results_without_ids_are_of_the_calls_in_their_places(pool: Pool) -> None:
    results = (ToolResult("", "", "one", size=3), ToolResult("", "", "two", size=3))
    assert shown(pool, (calls("a", "b"), None), (DONE, seen(*results))) == [
        "result of tool1, 3 characters: one",
        "result of tool2, 3 characters: two",
    ]


def test_a_result_that_answers_no_known_call_is_not_said_to_answer_one(pool: Pool) -> None:
    stray = ToolResult("z", "grep", "stray", size=5)
    assert shown(pool, (calls("a", "b"), None), (DONE, seen(stray))) == [
        "result of tool1 is not known",
        "result of tool2 is not known",
        "result of grep, whose call is not known, 5 characters: stray",
    ]
    assert shown(pool, (calls("a", "b"), None), (DONE, seen(stray)), linked=False) == [
        "result of tool1 is not known",
        "result of tool2 is not known",
        "before it, result of grep, whose call is not known, 5 characters: stray",
    ]


def test_a_message_of_the_user_is_no_result_of_a_tool(pool: Pool) -> None:
    spoken = ToolResult("", "", "stop that", size=9, spoken=True)
    assert shown(pool, (calls("a"), None), (DONE, seen(spoken))) == [
        "result of tool1 is not known",
        "message of the user, 9 characters: stop that",
    ]
    written = {"role": "assistant", "content": "```bash\nls\n```"}
    assert shown(pool, (written, None), (DONE, seen(spoken))) == ["message of the user, 9 characters: stop that"]


def test_what_a_side_call_was_asked_stands_in_no_tools_place(pool: Pool) -> None:
    """A call with the same history, for a title, comes before the work goes on."""
    attempt = attempt_of(pool, (calls("a"), None), shape=RequestShape(tools=1, opening=1))
    title = ToolResult("", "", "name this", size=9, spoken=True)
    aside = replace(new_completion(attempt), observed=seen(title), follows=1)
    work = replace(new_completion(attempt), observed=seen(ToolResult("a", "", "here", size=4)), follows=1)
    shapes = (RequestShape(opening=1, turns=1, continues=1), RequestShape(tools=1, opening=1, turns=1, continues=1))
    record(pool, [replace(item, shape=shape) for item, shape in zip((aside, work), shapes, strict=True)])
    lines = show(pool, attempt)
    assert any(f", {SIDE}, " in line for line in lines)
    assert [line.strip() for line in lines if "result of" in line] == ["result of tool1, 4 characters: here"]
