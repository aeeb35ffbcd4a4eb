"""Task files are input: each hostile one ends in one sentence, in bounded time and memory, before anything is built."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cli import main
from harness.monitor.progress import closing_table, make_console
from harness.tasks.sources import load_sources
from proxy.pool.errors import UserError
from proxy.pool.rollouts.groups import RolloutRow
from sandboxes.base import SandboxError
from sandboxes.docker.image.build_context import files
from tests.harness.conftest import HELLO, write_tasks
from tests.harness.test_harbor import task_directory

SPARE_BYTES = 2 << 30
"""Memory that a load may take beyond what the test process has."""
ASKED = {"id": "q", "domain": "qa", "instruction": "?"}
FREELY = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
COMPOSE = "environment__docker-compose_dot_yaml"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@contextmanager
def little_memory() -> Iterator[None]:
    """Leave the process SPARE_BYTES, so that what needs more fails with a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sentence_of(source: Path) -> str:
    """The one sentence with which a source is refused."""
    with pytest.raises(UserError) as raised:
        load_sources([str(source)])
    sentence = str(raised.value)
    assert sentence.isprintable() and len(sentence) < 20_100
    return sentence


@pytest.mark.parametrize(
    "line, sentence",
    [
        (json.dumps(HELLO | {"timeout": 1e300}), "timeout = 1e+300: expected `float` <= 2592000"),
        (json.dumps(HELLO)[:-1] + ', "timeout": 1e999}', "Number out of range"),
        (json.dumps(HELLO)[:-1] + ', "timeout": NaN}', "not a JSON object"),
        (json.dumps(HELLO)[:-1] + f', "max_turns": {"9" * 5000}}}', "Integer value out of range"),
        (json.dumps(HELLO)[:-1] + f', "metadata": {{"a": {"9" * 50}}}}}', "integer of more than 64 bits"),
        (json.dumps(HELLO | {"limits": {"memory_mb": 2**40}}), "limits.memory_mb = 1099511627776: expected `int` <="),
        (json.dumps(HELLO)[:-1] + f', "metadata": {"[" * 5000}{"]" * 5000}}}', "nested more than 64 levels deep"),
        (json.dumps(HELLO)[:-1] + f', "metadata": {{"a": {"[" * 100}{"]" * 100}}}}}', "nested more than 64 levels"),
        (json.dumps(HELLO | {"metadata": {"a": [0] * 100_001}}), "more than 100000 values"),
        (json.dumps(HELLO | {"instruction": "x" * (9 << 20)}), "more than 8388608 bytes"),
        (json.dumps(HELLO | {"id": "\x1b[2Jgone"}), r"id: '\x1b[2Jgone' is no name"),
        (json.dumps(HELLO | {"id": "x" * 300}), "is no name; use at most 200 characters"),
        (json.dumps(HELLO | {"\x1b]0;title\x07": 1}), r"unknown key `\x1b]0;title\x07`"),
        (json.dumps(HELLO | {"directories": {"x": "d" * 5000}}), "is no directory"),
        (json.dumps(HELLO | {"image": {"directory": ".", "dockerfile": "../x"}}), "image.dockerfile: '../x' leads out"),
        (
            json.dumps(HELLO | {"services": [{"name": f"s{n}", "image": {"name": "x"}} for n in range(65)]}),
            "expected `array` of length <= 64",
        ),
        (json.dumps(HELLO | {"clean": {"keep": ["x"] * 1001}}), "clean.keep = "),
        (
            json.dumps(HELLO | {"verifier": {"command": "true", "keep": ["x"] * 1001}}),
            "expected `array` of length <= 1000",
        ),
        (
            json.dumps(HELLO | {"verifier": {"command": "x", "artifacts": [{"path": "x", "exclude": ["x"] * 1001}]}}),
            "expected `array` of length <= 1000",
        ),
        (json.dumps(ASKED | {"checker": {"kind": "regex", "pattern": "(" * 1000}}), "is no regular expression"),
        (json.dumps(ASKED | {"checker": {"kind": "regex", "pattern": "a{" + "9" * 20 + "}"}}), "is no regular expr"),
        (json.dumps(ASKED | {"checker": {"kind": "regex", "pattern": "a" * 3000}}), "3000 characters; at most 2000"),
    ],
)
def test_a_hostile_line_is_refused_in_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(line + "\n")
    assert sentence in sentence_of(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize(
    "toml, sentence",
    [
        (f"a{'.a' * 30_000} = 1", "a key of more than 32 parts"),
        (f"[{' . '.join(['a', chr(34) + 'b' + chr(34)] * 20)}]", "a key of more than 32 parts"),
        (f'x = "\\"{"a." * 40}"\n', "a key of more than 32 parts (or a text like one)"),
        (f'x = "{chr(92)}"{(chr(92) + chr(34)) * 120_000}', "is not valid TOML"),
        (f"x = {'[' * 3000}", "nested more than 64 levels deep"),
        (f"x = {'[' * 100}{']' * 100}", "nested more than 64 levels deep"),
        (f"x = {'9' * 5000}", "is not valid TOML"),
        (f"x = 0x{'f' * 5000}", "integer of more than 64 bits"),
        ("x = nan", "a number that is nan"),
        ("[metadata]\nx = -inf", "a number that is -inf"),
        ("[agent]\ntimeout_sec = 1e300", "agent.timeout_sec = 1e+300: expected `float` <= 2592000"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec = -1: expected `float` > 0"),
        ('[agent]\ntimeout_sec = "nan"', "agent.timeout_sec = 'nan': expected `float` > 0"),
        ('[[steps]]\nname = "a"\nmin_reward = "nan"', "a number that is nan"),
        (f'[environment]\nmemory = "{"9" * 400}G"', "is no size"),
        ('[environment]\nmemory = "9999999999G"', "limits.memory_mb = 10239999998976: expected `int` <= 2147483647"),
        ("[environment]\ncpus = 1e300", "environment.cpus = 1e+300: expected `float` <= 1000000"),
        ('[environment.healthcheck]\ncommand = "x"\nretries = 2000000000', "setup_timeout = "),
        ('[task]\nname = "\\u001b[2J"', "id: '\\x1b[2J' is no name"),
        ("# " + "x" * (256 << 10), "more than 262144 bytes"),
    ],
)
def test_a_hostile_task_file_is_refused_in_one_sentence(tmp_path: Path, toml: str, sentence: str) -> None:
    with little_memory():
        assert sentence in sentence_of(task_directory(tmp_path / "task", toml, steps__a__instruction_dot_md="Do."))


@pytest.mark.parametrize(
    "yaml, sentence",
    [
        (LAUGHS + "services: {main: {command: *j}}", "more than 100000 values with its aliases expanded"),
        ("services: &a {main: *a}", "has an alias of itself"),
        (f"services: {'[' * 3000}", "nested more than 64 levels deep"),
        (f"services: {{main: {{environment: {{A: {'9' * 5000}}}}}}}", "cannot be read as YAML"),
        (f"services: {{main: {{environment: {{A: 0x{'f' * 50}}}}}}}", "integer of more than 64 bits"),
        ("services: {main: {}, a: {image: x, healthcheck: {test: x, retries: .inf}}}", "a number that is inf"),
        ("services: {main: {}, a: {image: x, healthcheck: {test: x, retries: -100}}}", "services[0].ready_timeout = -"),
        (
            f"services: {{main: {{}}, a: {{image: x, healthcheck: {{test: x, interval: {'9' * 400}s}}}}}}",
            "a number that is inf",
        ),
        ('services: {main: {environment: {A: "\\ud800"}}}', "a text that is no Unicode"),
        (f"services: {{main: {{}}, {', '.join(f's{n}: {{image: x}}' for n in range(70))}}}", "more than 64 services"),
        ("services: {main: {}, a: {build: {context: ., dockerfile: ../../x}}}", "dockerfile: '../../x' leads out"),
        ("services: {main: {image: x}}  # " + "x" * (64 << 10), "more than 65536 bytes"),
    ],
)
def test_a_hostile_compose_file_is_refused_in_one_sentence(tmp_path: Path, yaml: str, sentence: str) -> None:
    with little_memory():
        assert sentence in sentence_of(task_directory(tmp_path / "task", **{COMPOSE: yaml}))


@pytest.mark.parametrize(
    "name",
    ["environment", "tests", "solution", "instruction.md", "task.toml", "environment/secret", "tests/a/x"],
)
def test_a_link_that_leads_out_of_a_task_directory_leaves_the_task_out(tmp_path: Path, name: str) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "Dockerfile").write_text("FROM bb:1\nCOPY . /")
    (host / "id_rsa").write_text("a key of this machine")
    whole = task_directory(tmp_path / "tasks/task", solution__solve_dot_sh="true", tests__a__x="")
    place = whole / name
    target = host if place.is_dir() else host / "Dockerfile"
    if place.exists():
        place.rename(tmp_path / "old")
    place.symlink_to(target)
    assert f"is a link that leads out of {whole} (to {target})" in sentence_of(tmp_path / "tasks")


def test_a_link_within_a_task_directory_is_served(tmp_path: Path) -> None:
    whole = task_directory(tmp_path / "task")
    (whole / "tests/again.sh").symlink_to("test.sh")
    (whole / "tests/later").symlink_to("../environment/not-there-yet")
    assert len(load_sources([str(whole)]).mix.tasks) == 1


@pytest.mark.parametrize("target", ["x0", "not-there/../x0", "y" * 300], ids=["chain", "chain after nothing", "name"])
def test_a_link_that_the_kernel_does_not_follow_leaves_the_task_out(tmp_path: Path, target: str) -> None:
    tests = task_directory(tmp_path / "tasks/task") / "tests"
    (tests / "first").symlink_to(target)
    for number in range(1500):
        (tests / f"x{number}").symlink_to(f"x{number + 1}")
    assert f"tests/first is a link that leads out of {tests.parent} (to {target})" in sentence_of(tests.parent)


def test_a_chain_of_links_that_the_kernel_follows_is_served(tmp_path: Path) -> None:
    tests = task_directory(tmp_path / "task") / "tests"
    for number in range(1, 40):
        (tests / f"x{number}").symlink_to(f"x{number + 1}")
    (tests / "x40").symlink_to("test.sh")
    assert len(load_sources([str(tests.parent)]).mix.tasks) == 1
    (tests / "x0").symlink_to("x1")
    assert "tests/x0 is a link that leads out of" in sentence_of(tests.parent)


def test_a_dockerfile_that_is_too_large_is_refused(tmp_path: Path) -> None:
    whole = task_directory(tmp_path / "tasks/task")
    os.truncate(whole / "environment/Dockerfile", 2 << 20)
    source = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"image": {"directory": str(whole / "environment")}})
    for place in (tmp_path / "tasks", source):
        assert "environment/Dockerfile has more than 1 MiB, too much to be searched" in sentence_of(place)


@pytest.mark.parametrize("field", ["image", "directories", "verifier"])
def test_a_directory_of_a_task_line_is_checked_too(tmp_path: Path, field: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/Dockerfile").write_text("FROM bb:1")
    (tmp_path / "data/passwd").symlink_to("/etc/passwd")
    more: dict[str, Any] = {"image": {"directory": "data"}} if field == "image" else {"directories": {"x": "data"}}
    line = HELLO | ({"verifier": {"command": "true", **more}} if field == "verifier" else more)
    source = write_tasks(tmp_path / "tasks.jsonl", line)
    assert "tasks.jsonl line 1: " in (sentence := sentence_of(source)) and "(to /etc/passwd)" in sentence


def test_a_special_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tasks.jsonl")
    assert "is not a regular file" in sentence_of(tmp_path / "tasks.jsonl")
    os.mkfifo(task_directory(tmp_path / "task") / "tests/pipe")
    assert "tests/pipe is a socket, a pipe or a device" in sentence_of(tmp_path / "task")
    (tmp_path / "mix.toml").symlink_to("/dev/zero")
    assert "is not a regular file" in sentence_of(tmp_path / "mix.toml")


def test_a_deep_or_huge_tree_is_refused(tmp_path: Path) -> None:
    (task_directory(tmp_path / "deep") / "tests" / "/".join("d" * 101)).mkdir(parents=True)
    assert "more than 100 directories deep" in sentence_of(tmp_path / "deep")
    with (task_directory(tmp_path / "huge") / "tests/holes").open("wb") as file:
        file.truncate(1 << 40)
    assert "holds more than 16 GiB" in sentence_of(tmp_path / "huge")


def test_links_in_a_circle_are_searched_once(tmp_path: Path) -> None:
    task_directory(tmp_path / "tasks/one")
    for name in ("a", "b", "c"):
        (tmp_path / "tasks" / name).symlink_to(".")
    assert [task.id for task in load_sources([str(tmp_path / "tasks")]).mix.tasks] == ["one"]
    assert [task.id for task in load_sources([f"{tmp_path}/**/one"]).mix.tasks] == ["one"]
    for number in range(30):
        (tmp_path / f"tasks/link{number}").symlink_to(".")
    assert "holds no task" in sentence_of(tmp_path / "tasks/*/*/*/*/*/*/*/*/none")
    (tmp_path / "tasks/out").symlink_to("/usr")
    assert "tasks/out is a link that leads out of" in sentence_of(tmp_path / "tasks")


def test_a_name_that_looks_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    row = RolloutRow(
        rollout=1, task="[/red] [link=x]", group=0, member=0, agent="[bold]", reward=1.0, failure=None, detail=None,
        finished=True, attempts=1, completions=1, trainable=1, sampled_tokens=1, seconds=1.0,
    )  # fmt: skip
    make_console().print(closing_table([row]))
    assert "[/red] [link=x]" in (shown := capsys.readouterr().out) and "[bold]" in shown


def test_the_command_line_says_it_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "\x1b[31mred").write_text(f"{'[' * 5000}\n")
    assert main(["validate", str(tmp_path / "\x1b[31mred")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and "\\x1b[31mred line 1 is nested" in shown.err
    assert shown.err.count("\n") == 1 and shown.err.strip().isprintable()


WORDS = st.text(max_size=12) | st.text("ab.'\"\\[]{}=:,#-*&!?%@`|>\n \t0", max_size=40)
NUMBERS = st.sampled_from(
    ["0", "-1", "1.5", "nan", "-inf", ".inf", "1e300", "1e999", "9" * 30, "9" * 5000, "0x" + "f" * 40, "1_0", "1:2:3"]
)
TOML = [
    *("[agent]\n", "[environment]\n", "[verifier]\n", "[[steps]]\n", "[[source]]\n", "[domains]\n", "'" * 3, '"' * 3),
    *("timeout_sec = ", "memory = ", "cpus = ", 'name = "x"\n', "path = ", "weight = ", "env = { A = ", "qa = ", "}"),
    *("\n", "a" + ".a" * 40, "[[a." * 9, "[" * 900, '"${A:-${B"', "min_reward = ", "healthcheck = { command = "),
]
YAML = [
    *("services:\n", "  main:\n", "  web:\n", "    image: x\n", "    environment:\n", "      A: ", "    healthcheck:"),
    *(" {test: x, retries: ", "}\n", "&a ", "*a ", "<<: *a\n", "[" * 90, "? ", "- ", "!!python/object:os.system "),
    *("    depends_on: ", "    build: ", "volumes: ", "\n", "---\n", "|\n", "!!timestamp 2001-99-99", "%TAG ! x\n"),
]
KEYS = st.sampled_from(
    ["id", "instruction", "verifier", "command", "timeout", "limits", "memory_mb", "steps", "name", "env", "image"]
    + ["directory", "services", "checker", "kind", "pattern", "domain", "metadata", "files"]
)
LEAVES = (
    NUMBERS
    | WORDS.map(json.dumps)
    | st.sampled_from(["null", "true", "NaN", '"\\ud800"', '"qa"', '"regex"', '"../x"', "[" * 2000])
)


def tables(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(KEYS, values).map(lambda pair: f'"{pair[0]}": {pair[1]}')
    return st.lists(pairs, max_size=6).map(lambda items: f"{{{', '.join(items)}}}")


def mixed(fragments: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(fragments) | NUMBERS | WORDS, max_size=15).map("".join)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


FORMATS: dict[str, tuple[st.SearchStrategy[str], Callable[[Path, str], object]]] = {
    "task line": (
        tables(LEAVES | tables(LEAVES) | tables(tables(LEAVES)) | tables(LEAVES).map("[{}]".format)),
        lambda place, text: load_sources([str(written(place / "tasks.jsonl", f"{json.dumps(HELLO)}\n{text}"))]),
    ),
    "task.toml": (mixed(TOML), lambda place, text: load_sources([str(task_directory(place, text))])),
    "compose": (mixed(YAML), lambda place, text: load_sources([str(task_directory(place, **{COMPOSE: text}))])),
    "mix": (mixed(TOML), lambda place, text: load_sources([str(written(place / "mix.toml", text))])),
    "dockerignore": (
        st.text("ab*?[]^!\\/.-#\n ", max_size=200),
        lambda place, text: list(files(written(place / ".dockerignore", text).parent, "Dockerfile")),
    ),
}


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_stands_in_a_file_is_read_or_refused_in_one_sentence(name: str, examples: int) -> None:
    texts, load = FORMATS[name]

    @settings(FREELY, max_examples=examples)
    @given(texts)
    def check(text: str) -> None:
        with TemporaryDirectory() as directory, little_memory():
            try:
                load(Path(directory), text)
            except (UserError, SandboxError) as error:
                assert len(str(error)) < 20_100 and str(error).replace("\n", " ").isprintable()

    check()
