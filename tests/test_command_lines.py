"""What the four commands have in common: help ends with examples, errors name a page, shells complete words."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import harness.cli
import proxy.commands.main
import sandboxes.cli
import trainer.commands.main
from harness.settings import Settings
from proxy.pool.errors import UserError
from proxy.pool.terminal.command_line import verbs
from proxy.pool.terminal.errors import PAGES, page_of

ROOT = Path(__file__).parent.parent

PARSERS = {
    "proxy": proxy.commands.main.parser,
    "harness": harness.cli.parser,
    "trainer": trainer.commands.main.parser,
    "sandboxes": sandboxes.cli.parser,
}
LONGEST = 70
"""Characters of an example: help breaks longer lines, at hyphens too, and a broken option cannot be copied."""


def with_verbs(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and its verbs that have verbs of their own, with the words that lead to each."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield words, parser
            for name, sub in action.choices.items():
                yield from with_verbs(sub, f"{words} {name}")


@pytest.mark.parametrize("command", PARSERS)
def test_every_verb_shows_an_example_that_parses(command: str) -> None:
    parser = PARSERS[command]()
    wrong = {}
    for words, verb in verbs(parser, command):
        found = re.search(r"^example: (.*)\n\Z", verb.format_help(), re.MULTILINE)
        if not found or not found[1].startswith(f"{words} ") and found[1] != words or len(found[1]) > LONGEST:
            wrong[words] = verb.epilog
        else:
            parser.parse_args(shlex.split(found[1])[1:])
    assert wrong == {}


@pytest.mark.parametrize("command", PARSERS)
def test_the_help_above_verbs_ends_with_the_example_of_each(command: str) -> None:
    above = dict(with_verbs(PARSERS[command](), command))
    assert command in above and ("proxy pool" in above) is (command == "proxy")
    for words, parser in above.items():
        examples = [f"  {(verb.epilog or '').removeprefix('example: ')}" for _, verb in verbs(parser, words)]
        _, _, shown = parser.format_help().partition("\nexamples:\n")
        assert shown.splitlines() == examples and len(set(examples)) == len(examples) > 0, words


ALONE = {"proxy": proxy.commands.main.parser, "harness": harness.cli.parser}
"""The commands that load the module of one verb only."""


@pytest.mark.parametrize("command", ALONE)
def test_a_verb_has_the_same_help_without_the_others(command: str) -> None:
    for words, verb in verbs(ALONE[command](), command):
        alone = dict(verbs(ALONE[command](words.split()[1:]), command))
        assert alone[words].format_help() == verb.format_help()


@pytest.mark.parametrize(("words", "other"), [("harness agents", "run"), ("proxy tiny-model", "serve")])
def test_a_verb_loads_no_other_one(words: str, other: str) -> None:
    command, verb = words.split()
    code = f"import sys, {ALONE[command].__module__} as command; command.parser([{verb!r}]); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"{command}.commands.{verb.replace('-', '_')}" in loaded and f"{command}.commands.{other}" not in loaded


USAGE = {
    "proxy": "models.md",
    "proxy serve": "models.md",
    "proxy pool": "pool.md",
    "proxy pool show a b --colour": "pool.md",
    "proxy dashboard": "dashboard.md",
    "harness run tasks.jsonl --colour": "runs.md",
    "harness agents install": "agents.md",
    "harness validate": "tasks.md",
    "harness rescore": "rewards.md",
    "trainer launch --colour red": "training.md",
    "trainer rollback train.toml --to x": "monitor.md",
    "trainer continue --colour": "monitor.md",
    "trainer logprobs": "models.md",
    "trainer doctor --colour": "cluster.md",
    "sandboxes gc --host": "sandboxes.md",
}


@pytest.mark.parametrize(("line", "page"), USAGE.items(), ids=list(USAGE))
def test_an_error_of_usage_names_the_page_of_the_verb(line: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = line.split()
    with pytest.raises(SystemExit) as ended:
        PARSERS[command]().parse_args(words)
    *usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "error: " in error and error.endswith(f" (see docs/{page})")
    assert usage[0].startswith(f"usage: {command} {words[0]}" if words else f"usage: {command} ")


def test_a_limit_of_tokens_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSERS["harness"]().parse_args(["run", "tasks.jsonl", "--tokens", "0:many"])
    assert "argument --tokens: '0:many' is no limit of tokens; write a number as 8000" in capsys.readouterr().err


def test_every_parser_has_a_page() -> None:
    for command in ("proxy", "harness", "trainer"):
        for words, _ in (*with_verbs(PARSERS[command](), command), *verbs(PARSERS[command](), command)):
            assert page_of(".".join([command, "commands", *words.split()[1:]])), words


def test_a_daemon_that_does_not_answer_is_an_error_with_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sandboxes.cli.main(["ls", "--root", str(tmp_path), "--docker", f"unix://{tmp_path}/none.sock"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(" (see docs/sandboxes.md)\n")


def test_an_error_names_the_page_that_explains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}')
    assert harness.cli.main(["validate", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(" (see docs/tasks.md)\n")
    (tmp_path / "train.toml").write_text('pool = "p"\nrun = "r"\nmodel = "m"\noutput = "o"\n[batch]\nwindow = 0\n')
    assert trainer.commands.main.main(["launch", str(tmp_path / "train.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(" (see docs/models.md)\n") and error.count("\n") == 1
    assert proxy.commands.main.main(["dashboard", str(tmp_path / "none.db")]) == 2
    assert capsys.readouterr().err.endswith(" (see docs/pool.md)\n")


@pytest.mark.parametrize(
    ("command", "text", "page"),
    [
        (["proxy", "serve"], "[engine]\nmodel = 'm'\n", "models.md"),
        (["harness", "run"], "tasks = 'tasks.jsonl'\n", "runs.md"),
        (["trainer", "launch"], "pool = 'p'\nrun = 'r'\nmodel = 'm'\noutput = 'o'\n", "training.md"),
    ],
)
def test_an_unknown_key_names_the_page_of_its_file(
    command: list[str], text: str, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.toml").write_text(text + "speed = 3\n")
    main = {"proxy": proxy.commands.main.main, "harness": harness.cli.main, "trainer": trainer.commands.main.main}
    assert main[command[0]]([*command[1:], str(tmp_path / "file.toml")]) == 2
    error = capsys.readouterr().err
    assert "unknown key `speed`" in error and error.endswith(f" (see docs/{page})\n")


@pytest.mark.parametrize("flag", ["--group-size", "--limit", "--tokens", "--redundant"])
def test_the_range_of_a_flag_is_that_of_its_setting(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    assert harness.cli.main(["run", str(tmp_path / "tasks.jsonl"), flag, "-1"]) == 2
    error = capsys.readouterr().err
    assert f"{flag.strip('-').replace('-', '_')} = -1: expected `int` >= " in error and error.count("\n") == 1


def test_help_names_the_values_that_settings_have() -> None:
    [run] = [parser for words, parser in verbs(harness.cli.parser(), "harness") if words == "harness run"]
    told = {flag.dest: flag.help or "" for flag in run._actions}
    numbers = {field.name: field.default for field in msgspec.structs.fields(Settings) if type(field.default) is int}
    assert numbers and all(f"(default: {number})" in told[name] for name, number in numbers.items())


def test_the_pages_of_errors_and_their_modules_exist() -> None:
    assert {page for page in PAGES.values() if page and not (ROOT / "docs" / page).exists()} == set()
    places = {name: ROOT / name.replace(".", "/") for name in PAGES}
    assert {
        name for name, place in places.items() if not place.is_dir() and not place.with_suffix(".py").exists()
    } == set()


NO_PAGE = {
    "proxy.pool.functions.process": "a user's function: the page of the setting that names it",
    "proxy.pool.functions.weights": "the same",
    "proxy.pool.input_files": "a file of any kind: the page of its reader",
    "proxy.pool.settings_file": "settings of any command: the page of their class",
    "trainer.megatron.parallel": "hands on what rank 0 has raised: the page of the caller",
}
"""Modules whose errors name the page of the caller, with the reason."""


def test_every_module_that_raises_an_error_of_the_user_has_a_page() -> None:
    texts = {module_name(file): file.read_text() for package in PARSERS for file in (ROOT / package).rglob("*.py")}
    bases = [found for text in texts.values() for found in re.findall(r"^class (\w+)\((\w+)\):", text, re.M)]
    kinds = {UserError.__name__}
    while more := {name for name, base in bases if base in kinds} - kinds:
        kinds |= more
    made = re.compile(rf"(?<!class )(?<!def )\b(?:demand|{'|'.join(kinds)})\(")
    raising = {name for name, text in texts.items() if made.search(text)}
    assert len(kinds) > 5 and len(raising) > 90
    assert {name for name in raising if page_of(name) is None} == set(NO_PAGE)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


COMPLETE = """\
source <({python} -c 'import sys; from {module} import parser; parser().parse_args(["--print-completion", "bash"])')
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_{command}
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("proxy.commands.main", "proxy pool ex", "export"),
        ("proxy.commands.main", "proxy pool export x y --format par", "parquet"),
        ("harness.cli", "harness run --sandb", "--sandbox"),
        ("trainer.commands.main", "trainer roll", "rollback"),
        ("sandboxes.cli", "sandboxes gc --bun", "--bundles"),
    ],
)
def test_bash_completes_words(module: str, words: str, expected: str) -> None:
    script = COMPLETE.format(python=sys.executable, module=module, words=words, command=words.split()[0])
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == ([expected], "")


def test_a_trainer_without_its_packages_says_what_to_install() -> None:
    code = "import sys; sys.modules['numpy'] = None; from trainer.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    sentence = "error: trainer needs the package numpy, which is not installed; install blackforge[trainer]\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
