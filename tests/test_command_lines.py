"""What the four commands have in common: every verb's help ends with an example, shells complete their words."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import harness.cli
import proxy.commands.main
import sandboxes.cli
import trainer.commands.main
from proxy.pool.terminal.errors import PAGES

ROOT = Path(__file__).parent.parent

PARSERS = {
    "proxy": proxy.commands.main.parser,
    "harness": harness.cli.parser,
    "trainer": trainer.commands.main.parser,
    "sandboxes": sandboxes.cli.parser,
}
LONGEST = 70
"""Characters of an example: help breaks longer lines, at hyphens too, and a broken option cannot be copied."""


def verbs(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The words that lead to each verb, with its parser."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield words, parser
    for action in inner:
        for name, sub in action.choices.items():
            yield from verbs(sub, f"{words} {name}")


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


def test_an_error_names_the_page_that_explains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}')
    assert harness.cli.main(["validate", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(" (see docs/tasks.md)\n")
    (tmp_path / "train.toml").write_text('pool = "p"\nrun = "r"\nmodel = "m"\noutput = "o"\n[batch]\nwindow = 0\n')
    assert trainer.commands.main.main(["launch", str(tmp_path / "train.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert proxy.commands.main.main(["dashboard", str(tmp_path / "none.db")]) == 2
    assert capsys.readouterr().err.endswith(" (see docs/dashboard.md)\n")


def test_the_pages_of_errors_and_their_modules_exist() -> None:
    assert {page for page in PAGES.values() if not (ROOT / "docs" / page).exists()} == set()
    assert {name for name in PAGES if find_spec(name) is None} == set()


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
