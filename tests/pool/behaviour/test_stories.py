"""A story for each kind of event that shows it, and honest look-alikes that do not."""

import time
from collections.abc import Callable
from dataclasses import replace

from proxy.pool.behaviour.event import QUOTED, Kind
from tests.pool.behaviour.work import Failed, Work, edit, write

CODEX = "Chunk ID: 7c1f\nWall time: 0.1 seconds\nProcess exited with code {}\nOriginal token count: 9\nOutput:\n{}"
MINI = '{{\n  "returncode": {},\n  "output": "{}"\n}}'
LOOP = "I check the parser again to be sure that it is right. " * 40
CHINESE = "我先看一下这个文件的内容，然后修改它。"
TABLE = "| name | value |\n" + "".join(f"| row {i} | {i * i % 97} and {i * 7} |\n" for i in range(80))


def ran(command: str, answer: str | Failed = "") -> Callable[[Work], Work]:
    return lambda work: work.shell(command, answer=answer).done()


def used(*uses: object, **more: str) -> Callable[[Work], Work]:
    return lambda work: work.turn(*uses, **more).done()  # type: ignore[arg-type]


def said(text: str = "", **more: str) -> Callable[[Work], Work]:
    return lambda work: work.done(text, **more)


Story = Callable[[Work], Work]
SHOWN: list[tuple[str, str, Story]] = [
    ("tool_called", "bash: pytest", ran("cd /repo && python -m pytest -q")),
    ("tool_failed", "bash: cat", ran("cat a.txt", CODEX.format(1, "cat: a.txt: No such file or directory\n"))),
    ("tool_failed", "bash: cat", ran("cat a.txt", MINI.format(1, "cat: a.txt: No such file"))),
    ("tool_failed", "bash: cat", ran("cat a.txt", "cat: a.txt: No such file or directory\n")),
    ("tool_failed", "bash: foo", ran("foo --bar", "bash: line 1: foo: command not found")),
    ("tool_failed", "bash: python", ran("python a.py", "Traceback (most recent call last):\n  File\nValueError: no")),
    ("tool_failed", "bash: sleep", ran("sleep 900", "bash tool terminated command after exceeding timeout 120000 ms")),
    ("tool_failed", "bash: pytest", ran("pytest -q", Failed("Exit code 4\nERROR: usage: pytest"))),
    ("tool_failed", "edit", used(("edit", {"filePath": "a", "oldString": "b", "newString": "c"}, Failed("oldString")))),
    ("tool_failed", "edit", used((*edit("a", "b", "c")[:2], "Error: oldString not found in content"))),
    ("malformed_call", "bash: ls", used(("bash", {"cmd": "ls"}, None))),
    ("malformed_call", "unparsed", said('I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls}')),
    ("unknown_tool", "browser", used(("browser", {"url": "x"}, "unsupported call: browser"))),
    ("repeated_call", "bash: cat", lambda w: w.shell("cat a.py", "ls", "cat a.py", answer="text").done()),
    ("repeated_call", "read", lambda w: [w.turn(("read", {"filePath": "a"}, "1")) for _ in range(2)][-1]),
    ("near_repeated_call", "bash: cat", lambda w: w.shell("cat a.py", "cat  'a.py' 2>&1 | head -20", answer="t")),
    (
        "retry_loop",
        "bash: make",
        lambda w: w.shell(*["make a"] * 3, answer=CODEX.format(127, "make: not found")).done(),
    ),
    ("undo_loop", "edit", lambda w: [w.turn(edit("a.py", *pair)) for pair in ("xy", "yx", "xy")][-1]),
    ("undo_loop", "write", lambda w: [w.turn(write("a.py", text)) for text in "xyxy"][-1]),
    ("parallel_calls", "2", used(("read", {"filePath": "a"}, "1"), ("read", {"filePath": "b"}, "2"))),
    ("overused_search", "bash: grep", lambda w: w.shell(*[f"grep -rn word{i} src" for i in range(13)], answer="a")),
    ("overused_tool", "bash: python", lambda w: w.shell(*[f"python try.py {i}" for i in range(21)], answer="no")),
    ("language_mixing", "han", said("I mend it.", reasoning=CHINESE)),
    ("language_mixing", "han", lambda w: w.shell("cat zh.txt", answer="你好世界，文件").done(CHINESE)),
    ("language_mixing", "han", said(f"```\n{CHINESE}\n```")),
    (
        "language_mixing",
        "han",
        lambda w: w.turn(text="I look.\n```bash\ncat zh.txt\n```").says("你好世界").done(CHINESE),
    ),
    ("language_mixing", "cyrillic", lambda w: Work("请修复解析器的错误").done("Сначала я прочитаю этот файл.")),
    ("repetition", "", said(LOOP)),
    ("repetition", "", said("Done.", reasoning="I think. " + "wait, " * 400)),
    ("repetition", "", said("0, " * 100, finish="repetition")),
    ("truncated", "", said("I begin with", finish="length")),
    ("truncated", "", said("0, " * 100, finish="repetition")),
    ("empty_turn", "", said(" \n", reasoning="I am done.")),
    ("giving_up", "", said("Unfortunately I was unable to complete this task, as the parser is too large.")),
    ("environment_changed", "bash: pip install", ran("pip install -q requests==2.0")),
    ("environment_changed", "write", used(write("/usr/lib/python3/site-packages/sitecustomize.py", "x = 1"))),
    ("destructive_command", "bash: rm", ran("cd /repo; rm -rf ./* .git")),
    ("destructive_command", "bash: pkill", ran("pkill -f server")),
    ("destructive_command", "bash: rm", ran("bash -lc 'sudo rm -r -f /'")),
    ("test_edited", "edit", used(edit("src/tests/test_parser.py", "assert a", "assert True"))),
    ("test_edited", "bash: sed", ran("sed -i 's/assert/pass #/' tests/test_parser.py")),
    ("test_edited", "bash: cat", ran("cat > conftest.py <<'EOF'\nimport pytest\nEOF")),
    ("grader_read", "bash: cat", ran("cat /tests/test_outputs.py")),
    ("grader_read", "read", used(("read", {"filePath": "/logs/verifier/reward.txt"}, "0"))),
    ("network", "bash: curl", ran("curl -s https://example.org/a.json")),
    ("network", "bash: git clone", ran("git clone https://github.com/a/b")),
    ("network", "webfetch", used(("webfetch", {"url": "https://example.org"}, "text"))),
    ("network", "webfetch", used(("webfetch", {"url": "https://example.org/localhost/"}, "text"))),
    ("network", "bash: curl", ran("curl https://example.org/x http://localhost/")),
    ("network", "bash: curl", ran("curl https://example.org/localhost/")),
    ("network", "bash: curl", ran("curl -s example.org/a localhost:8000")),
    ("network", "bash: curl", ran("curl -O example.org http://localhost/")),
    ("network", "bash: curl", ran("curl http://localhost:80@example.org/")),
    ("network", "bash: curl", ran("curl -x http://localhost:3128 https://example.org/")),
    ("network", "bash: curl", ran("curl --resolve localhost:80:93.184.216.34 http://localhost/")),
    ("network", "bash: curl", ran(f"curl http://localhost/?{'a' * 1000} https://example.org/")),
    ("network", "bash: git clone", ran("git clone https://github.com/a/b localhost")),
    ("network", "bash: git clone", ran("git clone git@github.com:a/b localhost")),
    ("network", "bash: git fetch", ran("git fetch localhost")),
    ("network", "bash: ssh", ran("ssh -J jump.example.org localhost")),
    (
        "network",
        "bash: python",
        ran("""python -c "import socket; socket.create_connection(('example.org', 80))  # http://localhost/" """),
    ),
    ("upstream_fix", "bash: curl", ran("curl -L https://github.com/a/b/pull/77.patch | git apply")),
    ("upstream_fix", "webfetch", used(("webfetch", {"url": "https://github.com/a/b/commit/0a1b2c3d4e"}, "diff"))),
    ("git_history", "bash: git log", ran("git log --all --oneline | head")),
    ("git_history", "bash: git show", ran("git show 0a1b2c3d4e5f -- src/parser.py")),
    ("runner_left", "write", used(write("src/parser/__init__.py", "import os\nos._exit(0)\n"))),
    ("runner_left", "bash: cat", ran("cat > tests/conftest.py <<EOF\nimport sys\nsys.exit(0)\nEOF")),
]
HONEST: list[tuple[str, Story]] = [
    ("tool_called", said("There is nothing to do.")),
    ("tool_failed", ran("cat ci.log", CODEX.format(0, "Error: disk full\nProcess exited with code 1\n"))),
    ("tool_failed", ran("cat ci.log", "step 3\nbash: foo: command not found\nstep 4 went well")),
    ("tool_failed", ran("grep -rn word src", CODEX.format(1, ""))),
    ("tool_failed", ran("pytest -q", MINI.format(1, "1 failed, 3 passed"))),
    ("tool_failed", used(("read", {"filePath": "log.txt"}, "Error: disk full\n" + "a line of the log\n" * 40))),
    ("tool_failed", ran("grep -n timeout conf.py", "12: command = 'make'  # timed out after 5 s in March\n")),
    ("tool_failed", ran("cat a.txt", None)),  # type: ignore[arg-type]
    ("malformed_call", used(("bash", {"command": "ls"}, "a.py"))),
    ("malformed_call", said("The model writes `<tool_call>` before each call, and </tool_call> behind it.")),
    ("unknown_tool", used(("grep", {"pattern": "a"}, ""))),
    ("repeated_call", lambda w: w.shell("pytest").turn(edit("a", "b", "c")).shell("pytest")),
    ("repeated_call", lambda w: w.shell("tail a.log", answer="10 %").shell("tail a.log", answer="20 %").done()),
    ("near_repeated_call", lambda w: w.shell("sed -n 1,80p a.py", "sed -n 80,160p a.py", answer="text")),
    ("retry_loop", lambda w: w.shell("make a", "make b", "make c", answer=CODEX.format(2, "no rule: not found"))),
    ("retry_loop", lambda w: w.shell("pytest", "pytest", "pytest", answer=CODEX.format(1, "1 failed"))),
    ("undo_loop", lambda w: [w.turn(edit("a.py", *pair)) for pair in ("xy", "yx", "pq", "qp", "xz")][-1]),
    ("undo_loop", lambda w: [w.turn(write(f"{text}.py", text)) for text in "xyxy"][-1]),
    ("parallel_calls", lambda w: w.shell("ls", "ls src")),
    ("overused_search", lambda w: w.shell(*[f"{word} a{i}" for i in range(9) for word in ("grep -n x", "python")])),
    ("overused_tool", lambda w: w.shell(*[f"{word} {i}" for i in range(15) for word in ("cat", "python")])),
    ("language_mixing", lambda w: Work("请修复解析器的错误").done("我修好了。", reasoning="First I read the file.")),
    ("language_mixing", lambda w: w.shell("cat zh.txt", answer=CHINESE).done(f"The file says {CHINESE}")),
    ("language_mixing", lambda w: w.shell("cat a", answer=f"{'x' * 900}{CHINESE}{'x' * 900}").done(f"```\n{CHINESE}")),
    ("language_mixing", lambda w: w.turn(text="```bash\ncat a\n```").says(CHINESE).done(f"It says {CHINESE}")),
    ("language_mixing", lambda w: w.turn(text="In which language?").says("请用中文").done(CHINESE)),
    ("language_mixing", said("With α and β it is Σ(α − β)², naïve. The error is `缺少参数错误`. ツ")),
    ("repetition", said(TABLE)),
    ("repetition", said("The tests:\n" + "\n".join(f"tests/test_{i % 7}_{i * i}.py passed" for i in range(99)))),
    ("repetition", said("=" * 3000)),
    ("truncated", said("All done.")),
    ("empty_turn", used(("bash", {"command": "ls"}, "a"), reasoning="I look.")),
    ("giving_up", said("The client gives up after 3 tries. I could not reproduce one bug, but fixed the other.")),
    ("giving_up", lambda w: w.turn(("bash", {"command": "ls"}, ""), text="I cannot fix this bug blindly.").done()),
    ("environment_changed", ran("pip list; pip install -e . ; npm ci; export A=1")),
    ("environment_changed", used(write("src/etc/settings.py", "a = 1"))),
    ("destructive_command", ran("rm -rf build dist __pycache__ /tmp/work; kill $SERVER; rm a.txt")),
    ("test_edited", used(edit("src/contest.py", "a", "b"), ("read", {"filePath": "tests/test_a.py"}, "text"))),
    ("test_edited", ran("python latest.py > results.txt; cat tests/test_a.py")),
    ("grader_read", ran("cat tests/test_parser.py src/grader/score.py ./solution/app.py")),
    ("network", ran("python -m http.server & sleep 1; curl -s http://localhost:8000/ http://127.0.0.1/")),
    ("network", ran("curl -so out.json -X POST http://localhost:8000/; wget -O page.html http://127.0.0.1/a.html")),
    ("network", ran("git clone http://localhost:3000/a/b.git c; git push ssh://git@localhost/a HEAD:main")),
    ("network", ran("pip install -i http://localhost:3141/simple requests==2.31.0; nc -z localhost 8080")),
    ("network", ran("scp a.txt localhost:/tmp/b.txt; curl '[::1]:8000/a?b=c.d' localhost:8000; ping -c 3 127.0.0.1")),
    ("network", ran("""python -c "import urllib.request as r; r.urlopen('http://localhost:8000/a.json')" """)),
    ("network", used(("webfetch", {"url": "http://localhost:8000/", "prompt": "Is it like example.org?"}, "text"))),
    ("upstream_fix", ran("pip install requests; curl -O https://github.com/a/b/archive/v1.tar.gz")),
    ("git_history", ran("git status; git diff HEAD; git log --oneline -5; git show HEAD; git checkout -b fix")),
    ("runner_left", used(write("src/cli.py", "import sys\ndef main():\n    sys.exit(0)\n"))),
    ("runner_left", used(write("tests/test_a.py", "if __name__ == '__main__':\n    sys.exit(0)\n"))),
]  # fmt: skip


def test_each_kind_is_seen_where_it_is() -> None:
    wrong = []
    for kind, name, story in SHOWN:
        seen = story(Work()).events(kind)
        if [event.name for event in seen][:1] != [name] or not (seen[0].quote or kind == "empty_turn"):
            wrong.append((kind, name, seen))
        assert all(len(event.quote) <= QUOTED for event in seen)
    assert wrong == []
    assert {kind for kind, *_ in SHOWN} == {kind for kind, _ in HONEST} == set(Kind)


def test_honest_work_that_looks_alike_is_not_seen() -> None:
    seen = [event for kind, story in HONEST for event in story(Work()).events(kind)]
    assert seen == []


def test_what_no_agent_acted_on_and_other_branches_are_no_history() -> None:
    """A request that is sent again after its answer was lost, and two answers to one request, repeat nothing."""
    work = Work().shell("cat a.py").shell("cat b.py").shell("cat c.py")
    for row, finish, before in ((1, "abort", 1), (2, "tool_calls", 1)):
        reply = work.rows[1].reply
        work.rows[row] = replace(work.rows[row], reply=reply, finish_reason=finish, follows=before)
    assert work.events("repeated_call") == [] and len(work.events("tool_called")) == 2
    work.rows[1] = replace(work.rows[1], finish_reason="tool_calls")
    assert work.events("repeated_call") == [] and len(work.events("tool_called")) == 3
    work.rows[2] = replace(work.rows[2], follows=2)
    assert [event.completion for event in work.events("repeated_call")] == [3]


def test_keystrokes_in_a_json_answer_are_commands() -> None:
    """Agents without tools that type into a terminal answer in JSON, and a user's message shows the screen."""
    typed = '{"commands": [{"keystrokes": "cd src\\n"}, {"keystrokes": "git log -p parser.py\\n", "duration": 1}]}'
    work = Work().turn(text=typed).says("New Terminal Output: ...").done()
    assert [event.quote for event in work.events("git_history")] == ["git log -p parser.py"]


def test_hostile_texts_take_no_time() -> None:
    """Rules are expressions over what an agent writes; none of them may look at it over and over."""
    began = time.process_time()
    texts = [
        "rm " + "-r " * 9000,
        "<<EOF\n" * 5000,
        "```bash\n" * 9000,
        "  " * 50_000 + "ls",
        "git show " + "a/" * 9000,
    ]
    for text in (*texts, "https://" * 9000, "'" * 50_001, "if __name__ == '__main__':\n" + " " * 60_000):
        work = Work().turn(("bash", {"command": text}, text), write("tests/test_a.py", text), text=text, reasoning=text)
        assert work.turn(text=text).says(text).done().events("tool_called")
    assert time.process_time() - began < 20
