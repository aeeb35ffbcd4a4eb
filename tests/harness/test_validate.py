"""harness validate: tasks that are broken on purpose get the verdict that names what is broken."""

import json
import resource
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.agents.bundles.install import agents_directory
from harness.cli import main
from harness.commands.judge_options import judge_at
from harness.tasks import Task, load_tasks
from harness.tasks.schema import Solution
from harness.validation.review import VERDICTS
from harness.validation.runner import ValidationPlan, ValidationResults, prove
from harness.validation.trials import TrialSpec, run_trial
from harness.verdict.judge import MAX_FILE, described, read
from proxy.pool.errors import PoolError, UserError
from sandboxes.base import SandboxError, Spec
from sandboxes.bundles import RUNTIME_NAME, read_manifest
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.local.bubblewrap import BubblewrapSandboxes, why_not
from sandboxes.local.process import ALONE, ProcessSandbox, ProcessSandboxes
from tests.conftest import need
from tests.harness.conftest import HELLO, ROOT, write_tasks

SOLVED = {"solution": {"command": "echo hello > hello.txt"}}
Validate = Callable[..., dict[str, dict[str, Any]]]


def broken(name: str, **fields: Any) -> dict[str, Any]:
    return HELLO | {"id": name} | SOLVED | fields


def checks(command: str) -> dict[str, Any]:
    return {"command": command, "timeout": 30}


BROKEN = [
    broken("accepted"),
    HELLO | {"id": "no solution"},
    broken("oracle fails", solution={"command": "echo helo > hello.txt; echo oops; exit 3"}),
    broken("no-op passes", verifier=checks("true")),
    broken("environment broken", setup="echo no disk; exit 7"),
]


@pytest.fixture
def validate(tmp_path: Path) -> Validate:
    """Run the command and give the report's lines by task."""

    def run(*more: str, tasks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        file = write_tasks(tmp_path / "tasks.jsonl", *tasks)
        assert main(["validate", str(file), "--out", str(tmp_path / "out"), "--sandbox", "process", *more]) == 0
        lines = (tmp_path / "out/report.jsonl").read_text().splitlines()
        return {row["id"]: row for row in map(json.loads, lines)}

    return run


def test_each_fault_has_its_verdict(validate: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = validate(tasks=BROKEN)
    assert {name: row["verdict"] for name, row in report.items()} == {task["id"]: task["id"] for task in BROKEN}
    causes = {name: row["cause"] for name, row in report.items()}
    assert causes["oracle fails"] == "its reward is 0 (the solution ended by exit code 3: oops)"
    assert causes["environment broken"] == "set-up ended by exit code 7: no disk"
    assert (report["accepted"]["oracle"], report["accepted"]["noop"]) == ([1.0, 1.0], [0.0, 0.0])
    accepted = load_tasks(tmp_path / "out/accepted.jsonl")  # what `harness run` does with it
    assert [task.id for task in accepted] == ["accepted"]
    assert "no-op passes: no-op passes: doing nothing has reward 1" in capsys.readouterr().out
    assert "# 1 of 5 tasks accepted" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize(
    "fields, cause",
    [
        ({"solution": {"command": "mkdir {0} && echo hello > hello.txt; true"}}, "oracle: 1, 0"),
        ({"verifier": checks("test -e hello.txt || mkdir {0}")}, "no-op: 1, 0"),
        ({"verifier": checks("mkdir {0} && exit 3; grep hello hello.txt")}, "oracle: none, 1"),
    ],
)
def test_what_differs_between_trials_is_flaky(
    validate: Validate, tmp_path: Path, fields: dict[str, Any], cause: str
) -> None:
    once = str(tmp_path / "once")
    fields = json.loads(json.dumps(fields).replace("{0}", once))
    report = validate("--concurrency", "1", tasks=[broken("flaky", **fields)])
    assert report["flaky"]["verdict"] == "flaky" and report["flaky"]["cause"].startswith(cause)


def test_a_solution_may_have_directories_beside_its_file(validate: Validate, tmp_path: Path) -> None:
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle/answer").write_text("hello")
    solution = {"command": "cp given/answer hello.txt", "directories": {"given": "oracle"}}
    assert validate(tasks=[broken("a", solution=solution)])["a"]["verdict"] == "accepted"


async def test_a_directory_that_has_gone_breaks_its_trial_and_no_other(tmp_path: Path) -> None:
    gone = msgspec.convert(broken("a", directories={"data": str(tmp_path / "gone")}), Task)
    trial = await run_trial(ProcessSandboxes(tmp_path / "sandboxes"), TrialSpec(gone, "a", "no-op", 0))
    assert (trial.reward, trial.failure) == (None, "environment") and "gone" in trial.detail


async def test_an_error_of_this_machine_breaks_its_trial_and_no_other(tmp_path: Path) -> None:
    task = msgspec.convert(broken("a"), Task)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))  # nothing more can be opened
    try:
        trial = await run_trial(ProcessSandboxes(tmp_path / "sandboxes"), TrialSpec(task, "a", "no-op", 0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert (trial.reward, trial.failure) == (None, "environment") and "Too many open files" in trial.detail


class Failing(ProcessSandboxes):
    """Sandboxes that do not start, for this error."""

    def __init__(self, root: Path, error: Exception):
        super().__init__(root)
        self._error = error

    async def start(self, spec: Spec = ALONE) -> ProcessSandbox:
        raise self._error


@pytest.mark.parametrize(
    ("error", "detail"), [(ValueError("no sandbox"), "ValueError: no sandbox"), (SandboxError("no disk"), "no disk")]
)
async def test_whatever_breaks_in_a_trial_breaks_no_other(tmp_path: Path, error: Exception, detail: str) -> None:
    spec = TrialSpec(msgspec.convert(broken("a"), Task), "a", "no-op", 0)
    trial = await run_trial(Failing(tmp_path / "sandboxes", error), spec)
    assert (trial.reward, trial.failure, trial.detail) == (None, "environment", detail)


@pytest.mark.parametrize("error", [UserError("correct the task"), PoolError("no pool")])
async def test_what_ends_the_command_ends_it_in_a_trial_too(tmp_path: Path, error: Exception) -> None:
    spec = TrialSpec(msgspec.convert(broken("a"), Task), "a", "no-op", 0)
    with pytest.raises(type(error), match=str(error)):
        await run_trial(Failing(tmp_path / "sandboxes", error), spec)


def test_a_no_op_without_a_verdict_is_no_zero(validate: Validate) -> None:
    report = validate(tasks=[broken("crashes", verifier=checks("cat hello.txt || exit 2"))])
    assert report["crashes"]["verdict"] == "environment broken" and report["crashes"]["noop"] == [None, None]
    assert report["crashes"]["cause"].startswith("no verdict on an untouched environment (exit code 2")


def test_steps_are_solved_one_after_the_other(validate: Validate) -> None:
    def step(name: str) -> dict[str, Any]:
        verifier = checks(f"test -e {name}")
        return {"name": name, "instruction": "-", "verifier": verifier, "solution": {"command": f"touch {name}"}}

    unsolved = step("b") | {"solution": None}
    tasks = [{"id": "both", "steps": [step("a"), step("b")]}, {"id": "half", "steps": [step("a"), unsolved]}]
    report = validate(tasks=tasks)
    assert report["both"]["verdict"] == "accepted"
    assert report["half"]["cause"] == "step 'b' has no solution"


def test_a_repeated_command_runs_only_what_is_new_or_lacked_its_environment(validate: Validate, tmp_path: Path) -> None:
    count = f"echo >> {tmp_path}/setups"
    first = [broken("kept", setup=count), broken("late", setup=f"{count}; test -e {tmp_path}/disk")]
    assert validate(tasks=first)["late"]["verdict"] == "environment broken"
    (tmp_path / "disk").touch()
    with (tmp_path / "out/trials.jsonl").open("a") as trials:
        trials.write('{"task": "cut sho')  # what a crash leaves
    report = validate(tasks=[*first, broken("new", setup=count)])
    assert {row["verdict"] for row in report.values()} == {"accepted"}
    assert (tmp_path / "setups").read_text().count("\n") == 4 * 2 + 4 * 2 + 3  # and a hollow one of each that passed


def test_code_without_work_that_earns_the_reward_is_named(validate: Validate) -> None:
    program = {"command": "echo 'print(6 * 7)' > answer.py; echo 42 > answer.txt"}
    runs_it = checks("test -e answer.py && python3 answer.py")
    compares = checks('test -e answer.py && test "$(python3 answer.py)" = 42')
    report = validate(
        tasks=[
            broken("bought", solution=program, verifier=runs_it),
            broken("earned", solution=program, verifier=compares),
        ]
    )
    bought = {name: [Path(path).name for path in row["bought_by"]] for name, row in report.items()}
    assert bought == {"bought": ["answer.py"], "earned": []}


def test_code_that_cannot_be_replaced_is_told(validate: Validate) -> None:
    """A program that runs cannot be written to. That once passed for a program that earns nothing."""
    started = "until [ /proc/$!/exe -ef tool ]; do sleep 0.05; done"
    running = {"command": f"cp $(command -v sleep) tool; ./tool 300 >/dev/null 2>&1 & {started}; touch hello.txt"}
    report = validate(tasks=[broken("runs", solution=running, verifier=checks("test -e hello.txt"))])
    assert (report["runs"]["verdict"], report["runs"]["bought_by"]) == ("accepted", [])
    assert report["runs"]["cause"].startswith("not tried whether code without work earns as much: the solution's pro")


def test_a_solutions_own_directory_is_no_work_wherever_it_lies(validate: Validate, tmp_path: Path) -> None:
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle/solve.sh").write_text("echo 'exit 0' > run.sh\n")
    bought = {}
    for place in ("given", "~/given", "."):
        solution = {"command": "sh ./solve.sh || sh given/solve.sh || sh ~/given/solve.sh"}
        task = broken(place, solution=solution | {"directories": {place: "oracle"}}, verifier=checks("sh run.sh"))
        bought[place] = [Path(path).name for path in validate("--repeat", "1", tasks=[task])[place]["bought_by"]]
    assert bought == {"given": ["run.sh"], "~/given": ["run.sh"], ".": ["run.sh", "solve.sh"]}


async def test_both_places_of_judgement_are_tried(tmp_path: Path) -> None:
    need("bubblewrap", not why_not())
    in_home = {"solution": {"command": "echo hello > ~/hello.txt"}}
    reads_home = checks("test -e /home/agent/hello.txt") | {"user": "agent"}
    fields: dict[str, dict[str, Any]] = {
        "fresh": {},
        "could be fresh": {"verifier": checks("test -e hello.txt && grep -qx hello hello.txt") | {"where": "shared"}},
        "shared only": in_home | {"verifier": reads_home | {"where": "shared"}},
        "should be shared": in_home | {"verifier": reads_home},
    }
    tasks = [msgspec.convert(broken(name, **more), Task) for name, more in fields.items()]
    sandboxes = BubblewrapSandboxes(tmp_path / "sandboxes")
    findings = await prove(sandboxes, ValidationPlan(tasks=tasks, repeat=1, concurrency=2), ValidationResults(tmp_path))
    assert {one.id: one.place for one in findings} == {"fresh": "", **{name: name for name in list(fields)[1:]}}
    assert [bool(one.not_stopped) for one in findings] == [False, True, True, False]
    assert [one.verdict for one in findings] == ["accepted"] * 3 + ["oracle fails"]


SOLUTIONS = {
    "hello-file": "echo hello > hello.txt",
    "count-errors": "grep -c ERROR app.log > errors.txt",
    "fix-add": "sed -i s/-/+/ calc.sh",
    "sort-people": "tail -n +2 people.csv | sort -t, -k2 -nr | cut -d, -f1 > names.txt",
    "partial-credit": "mkdir a b c; touch a/keep b/keep c/keep",
}


@pytest.mark.long
async def test_the_example_tasks_are_judged_in_fresh_sandboxes(tmp_path: Path) -> None:
    need("bubblewrap", not why_not())
    tasks = [
        msgspec.structs.replace(task, solution=Solution(command=SOLUTIONS[task.id]))
        for task in load_tasks(ROOT / "examples/tasks.jsonl")
    ]
    sandboxes = BubblewrapSandboxes(tmp_path / "sandboxes")
    findings = await prove(sandboxes, ValidationPlan(tasks=tasks, repeat=1, concurrency=2), ValidationResults(tmp_path))
    assert [(one.id, one.verdict, one.where) for one in findings] == [(name, "accepted", "fresh") for name in SOLUTIONS]


class Answers(BaseHTTPRequestHandler):
    """A judge that answers by the script: what it is asked about decides, and each answer is given once."""

    script: dict[str, list[str | int]] = {}
    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"key": self.headers["Authorization"]})
        about = next(name for name in self.script if name in body["messages"][1]["content"])
        answer = self.script[about].pop(0) if len(self.script[about]) > 1 else self.script[about][0]
        content = {"choices": [{"message": {"content": answer}}]}
        self.send_response(answer if isinstance(answer, int) else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Scripted", (Answers,), {"script": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    server.server_close()


def test_the_judge_flags_a_weak_test_and_its_silence_is_no_objection(
    validate: Validate, judge: tuple[str, type[Answers]], tmp_path: Path
) -> None:
    url, handler = judge
    weak = 'Thinking... {"weak": false}\n```json\n{"weak": true, "reasons": ["an empty file passes"]}\n```'
    handler.script = {"NAME-weak": [weak], "NAME-fine": [500, '{"weak": false}'], "NAME-mute": ["I like it."]}
    (tmp_path / "key").write_text("secret\n")
    tasks = [broken(name, instruction=f"NAME-{name}") for name in ("weak", "fine", "mute")] + [BROKEN[2]]
    asking = ["--judge", url, "--judge-model", "m", "--judge-key-file", str(tmp_path / "key")]
    report = validate(*asking, "--judge-pause", "0.01", tasks=tasks)
    assert (report["weak"]["verdict"], report["weak"]["cause"]) == ("weak test", "an empty file passes")
    assert (report["fine"]["verdict"], report["fine"]["cause"]) == ("accepted", "")
    assert report["mute"]["verdict"] == "accepted"
    assert "no opinion: the answer holds no object with `weak`: 'I like it.'" in report["mute"]["cause"]
    assert [task.id for task in load_tasks(tmp_path / "out/accepted.jsonl")] == ["fine", "mute"]
    assert len(handler.asked) == 1 + 2 + 3  # nobody asks about a task that failed its trials
    assert {(asked["model"], asked["key"]) for asked in handler.asked} == {("m", "Bearer secret")}
    validate(*asking, "--judge-pause", "0.01", tasks=tasks)
    assert len(handler.asked) == 1 + 2 + 3 + 3  # who had no opinion is asked again


def test_a_judge_that_is_not_there_has_no_opinion(validate: Validate) -> None:
    asking = ["--judge", "http://127.0.0.1:9/v1", "--judge-model", "m", "--judge-pause", "0.01"]
    report = validate(*asking, tasks=[broken("a")])
    assert report["a"]["verdict"] == "accepted" and report["a"]["cause"].startswith("the judge has no opinion: http://")


def test_a_reason_that_is_no_unicode_is_kept_with_a_mark() -> None:
    found = read(r'{"weak": true, "reasons": ["it has \ud800"]}')
    assert found is not None and found.reasons == ["it has ?"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weak",
        '{"weak": ' + "[" * 20_000,
        '{"weak": "yes"}',
        '{"weak": true',
        "[true]",
        '{"reasons": []}',
        '{"weak": true, "reasons": ["a test says "x" {"weak": false}"]}',
    ],
)
def test_what_says_nothing_is_no_opinion(text: str) -> None:
    assert read(text) is None


def test_the_form_that_a_judge_repeats_is_no_opinion() -> None:
    found = read('The form is {"weak": true or false, "reasons": ["one short sentence each"]}. {"weak": false}')
    assert found is not None and found.weak is False


def test_the_judge_reads_instruction_and_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text("grep -q hello")
    (tmp_path / "tests/data.bin").write_bytes(b"\0" * 100)
    (tmp_path / "tests/long.txt").write_text("x" * (MAX_FILE + 5))
    verifier = {"command": "sh /tests/test.sh", "directories": {"/tests": "tests"}, "rewards": "logs"}
    (task,) = load_tasks(write_tasks(tmp_path / "tasks.jsonl", HELLO | {"verifier": verifier}))
    text = described(task)
    assert "Write hello.txt" in text and "## /tests/test.sh\n\ngrep -q hello\n" in text
    assert "[100 bytes of data]" in text and "[the rest of this file is left out]" in text and "reward.json" in text


@pytest.mark.parametrize(
    "options, message",
    [
        (["--judge", "http://x/v1"], "--judge http://x/v1 needs the name of a model; give it with --judge-model"),
        (["--judge-model", "m"], "--judge-model and --judge-key-file go with --judge URL; name the endpoint"),
        (["--judge", "x", "--judge-model", "m"], "must be a URL that begins with http:// or https://: x"),
        (["--judge", "http://x", "--judge-model", "m", "--judge-key-file", "/no"], "correct --judge-key-file"),
    ],
)
def test_what_cannot_be_meant_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    file = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    assert main(["validate", str(file), "--out", str(tmp_path / "out"), "--sandbox", "process", *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content, reason",
    [("", "has 0 words; write one"), ("key one\nkey two\n", "has 4 words; write one"), ("schlüssel", "'ascii' codec")],
)
def test_a_key_that_no_header_can_carry_ends_the_start(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(UserError) as raised:
        judge_at("http://127.0.0.1:9/v1", "m", str(tmp_path / "key"))
    assert str(tmp_path / "key") in str(raised.value) and reason in str(raised.value)


def test_the_page_explains_every_verdict() -> None:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text().partition("## Validate")[2]
    assert [verdict for verdict in VERDICTS if f"| `{verdict}` |" not in text] == []


IMAGE = {"image": {"name": "deb:py"}, "limits": {"memory_mb": 256, "disk_mb": 64, "pids": 64}}


async def test_in_containers_each_fault_has_its_verdict_too(docker_daemon: str, tmp_path: Path) -> None:
    """The same verdicts; and those on images: one is missing, one cannot be built."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/Dockerfile").write_text("FROM deb:py\nRUN echo no such compiler && exit 9\n")
    tasks = [task | IMAGE for task in BROKEN]
    tasks += [broken("image gone") | {"image": {"name": "blackforge/no-such:1"}}]
    tasks += [broken("build fails") | {"image": {"directory": "bad"}}]
    plan = ValidationPlan(tasks=load_tasks(write_tasks(tmp_path / "tasks.jsonl", *tasks)), repeat=1, concurrency=4)
    sandboxes = await DockerSandboxes.open(Options(address=docker_daemon, run="test"))
    try:
        findings = {finding.id: finding for finding in await prove(sandboxes, plan, ValidationResults(tmp_path))}
    finally:
        await sandboxes.close()
    assert [findings[task["id"]].verdict for task in BROKEN] == [task["id"] for task in BROKEN]
    for name, cause in (("image gone", "blackforge/no-such:1"), ("build fails", "no such compiler")):
        assert findings[name].verdict == "environment broken" and cause in findings[name].cause


def test_what_needs_docker_is_not_tried_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tasks(tmp_path / "tasks.jsonl", HELLO | IMAGE)
    assert main(["validate", str(file), "--out", str(tmp_path / "out"), "--sandbox", "process"]) == 2
    assert "wants the image deb:py, which process sandboxes do not have; use Docker" in capsys.readouterr().err


@pytest.mark.long
def test_the_example_tasks_are_accepted(docker_daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("the agents' runtime (harness agents install runtime)", bool(read_manifest(agents_directory() / RUNTIME_NAME)))
    monkeypatch.setenv("DOCKER_HOST", docker_daemon)
    examples = Path(__file__).parents[2] / "examples/tasks/harbor"
    assert main(["validate", str(examples), "--out", str(tmp_path), "--sandbox", "docker"]) == 0
    findings = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert {(task["id"], task["verdict"], task["cause"]) for task in findings} == {
        (task["id"], "accepted", "") for task in findings
    }
    assert len(findings) == 5
