"""`trainer inspect`: what is shown is what was trained, and what cannot be shown is one sentence."""

import re
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from sqlalchemy import update
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.schema import completions, rollouts
from proxy.pool.training.windowed_fifo import of_step
from tests.trainer.make import VOCABULARY, fill, make_config, write_model
from trainer.commands.main import main
from trainer.config import Config
from trainer.config.step import step_options
from trainer.data.assemble import assemble
from trainer.loop import train
from trainer.megatron.parallel import Ranks
from trainer.report import tokens
from trainer.report.html import page
from trainer.report.inspect import InspectOptions, inspect
from trainer.report.terminal import LEVELS, level, show, visible
from trainer.report.view import StepView, TokenView, texts, view


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """One step on two groups: of the first, a completion is a side call and a member has no verdict."""
    tmp_path = tmp_path_factory.mktemp("inspect")
    write_model(tmp_path / "model")
    words = Tokenizer(WordLevel({f"w{name}": name for name in range(VOCABULARY)}, unk_token="w0"))
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    config = make_config(tmp_path, steps=1, report={"silent_alarms": ["kl_rollout"]})
    pool = open_pool(config.pool)
    fill(pool, runs.open_run(pool, config.run, "train", None).id, 2)
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.id == 2).values(label="side"))
        connection.execute(update(rollouts).where(rollouts.c.id == 1).values(reward=None, failure="verifier"))
    train(config, ranks)
    return config


def everything(step: StepView) -> list[TokenView]:
    return [token for rollout in step.rollouts for sequence in rollout.sequences for token in sequence.tokens]


def test_what_is_shown_is_what_was_trained(trained: Config) -> None:
    shown = [token for token in everything(view(trained, 1)) if token.coefficient is not None]
    assert len(shown) == 6 * 8 and {token.version for token in shown} == {"v1"}
    factors = set()
    for token in shown:
        assert token.text.strip() == f"w{token.id}"
        assert token.coefficient and token.logp and token.rollout_logp and token.advantage
        weight = min(5.0, np.exp(token.logp - token.rollout_logp))
        factors.add(round(token.coefficient / (weight * token.advantage), 3))
    pool = open_pool(trained.pool)
    rows = assemble(of_step(pool, runs.find_run(pool, trained.run).id, 1), step_options(trained, 1)).rows
    assert factors == {round(row.weight, 3) for row in rows} and len(factors) == 2


def test_every_rollout_is_shown_and_what_was_not_trained_says_why(trained: Config) -> None:
    step = view(trained, 1)
    shown = list(step.rollouts)
    assert (
        len(shown) == 8
        and "reward missing" in shown[0].title
        and "not trained: rollout_failed: verifier" in shown[0].title
    )
    assert [sequence.reason for rollout in shown[:3] for sequence in rollout.sequences] == [
        "rollout_failed: verifier",
        "label: side",
        None,
    ]
    assert "excluded_tokens" in step.title and "8 (label: side)" in step.title


def test_one_rollout_can_be_chosen(trained: Config) -> None:
    [rollout] = view(trained, 1, only=3).rollouts
    assert rollout.title.startswith("rollout 3  group 0, member 2")
    with pytest.raises(UserError, match="step 1 has no rollout 77; it has: 1, 2, 3, 4, 5, 6, 7, 8"):
        view(trained, 1, only=77)


def test_without_a_record_the_advantage_is_shown_and_said_to_be(trained: Config, tmp_path: Path) -> None:
    exact = [token.advantage for token in everything(view(trained, 1)) if token.coefficient is not None]
    step = view(msgspec.structs.replace(trained, output=str(tmp_path)), 1)
    rebuilt = [token for token in everything(step) if token.coefficient is not None]
    assert [token.coefficient for token in rebuilt] == [token.advantage for token in rebuilt] == exact
    assert all(token.logp is None for token in rebuilt)
    assert "colours show the advantage, and the ratios are not known" in step.notes[0]


def drawn(step: StepView, **options: object) -> str:
    console = Console(file=StringIO(), soft_wrap=True, highlight=False, **options)  # type: ignore[arg-type]
    show(step, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_terminal_has_colours_where_there_are_some_and_signs_where_not(trained: Config) -> None:
    plain, coloured = drawn(view(trained, 1)), drawn(view(trained, 1), force_terminal=True, color_system="truecolor")
    assert "\x1b" not in plain and "[+" in plain and "[-" in plain
    painted = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+)m w", coloured)
    assert {(int(red) > int(green)) for red, green, _ in painted} == {True, False} and len(painted) > 40


def test_the_page_holds_the_numbers_of_every_token(trained: Config) -> None:
    text = "".join(page(view(trained, 1)))
    one = next(token for token in everything(view(trained, 1)) if token.coefficient is not None)
    assert f"coefficient {one.coefficient:+.4g}, logp {one.logp:.4f}, rollout logp {one.rollout_logp:.4f}" in text
    assert len(re.findall(r'<span class="[ud]\d" title="id', text)) == 48
    assert 'title="not trained: label: side"' in text and "http" not in text


def test_what_a_model_wrote_steers_neither_terminal_nor_page() -> None:
    assert visible("a\x1b[2Jb\u202e\n") == "a\\u{1b}[2Jb\\u{202e}\n"
    hostile = StepView("<b>", [], 1.0, iter([]))
    assert "<b>" not in "".join(page(hostile))


def test_strength_grows_with_the_coefficient() -> None:
    assert [level(value, 1.0) for value in (0.0, 1e-6, -0.25, 1.0)] == [0, 1, LEVELS // 2, LEVELS]


def test_a_character_of_several_tokens_is_the_last_ones_and_ids_without_text_stay_ids() -> None:
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    bytes_ = Tokenizer(BPE({"Ã": 0, "¼": 1, "x": 2}, []))
    bytes_.decoder = ByteLevel()
    assert texts(bytes_, [2, 0, 1, 2, 9]) == ["x", "", "ü", "x", "<9>"]
    assert texts(None, [7]) == ["<7>"]


@pytest.mark.parametrize(
    ("step", "sentence"),
    [(0, "has not trained step 0; its steps are 1 to 1"), (5, "has not trained step 5; its steps are 1 to 1")],
)
def test_a_step_that_was_not_trained_is_one_sentence(trained: Config, step: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        inspect(trained, InspectOptions(step=step))


def test_a_damaged_record_is_one_sentence(trained: Config, tmp_path: Path) -> None:
    damaged = tokens.path(tmp_path, 1)
    damaged.parent.mkdir()
    damaged.write_bytes(tokens.path(Path(trained.output), 1).read_bytes()[:100])
    with pytest.raises(UserError, match="000001.npz is damaged .*delete it to see the step without"):
        view(msgspec.structs.replace(trained, output=str(tmp_path)), 1)


def test_the_command_line_writes_a_page_and_refuses_what_it_cannot_do(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = Path(trained.pool).parent / "trainer.toml"
    toml.write_text('pool = "pool.db"\nrun = "demo"\nmodel = "model"\noutput = "trainer"\n')
    assert main(["inspect", str(toml), "1", "--html", str(tmp_path / "step.html"), "--limit", "2"]) == 0
    assert (tmp_path / "step.html").read_text().count("<h2>") == 2
    assert main(["inspect", str(toml), "1", "--rollout", "3"]) == 0
    assert "rollout 3" in capsys.readouterr().out
    assert main(["inspect", str(toml), "9"]) == 2
    assert main(["inspect", str(toml), "1", "--limit", "0"]) == 2
    assert main(["inspect", str(toml), "1", "--html", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.split("; ")[1].partition(" (see ")[0] for error in errors] == [
        "its steps are 1 to 1",
        "name a number from 1",
        "name another file",
    ]
