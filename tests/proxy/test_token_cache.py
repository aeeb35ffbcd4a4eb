"""Texts tokenised in pieces have the ids of the whole, whatever the tokenizer's way with white space and markers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from proxy.prompt import token_cache
from proxy.prompt.continuation import history
from proxy.prompt.splice import PromptBuilder
from proxy.prompt.template import ChatTemplate
from proxy.prompt.token_cache import LONG, TokenCache
from proxy.recording import sessions
from proxy.recording.sessions import Session
from tests.proxy.conftest import Serve, user

PLAIN, INSIDE, LEFT, RIGHT, WORD, NORMAL = "<|a|>", "<|a|>b", "<left>", "<right>", "word", "<N>"
WORDS = ("the", " the", "  ", "\n", "é", "e\u0301", "x" * LONG, " y" * LONG)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def prefix_space() -> Tokenizer:
    """Puts a space before the text, but not behind a marker in the middle of it."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, prefix_space, composing])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    tokenizer: Tokenizer = request.param()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(["the house of the mouse, the end. éé yy xx"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (PLAIN, INSIDE)])
    tokenizer.add_special_tokens([AddedToken(LEFT, lstrip=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(RIGHT, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(WORD, single_word=True, normalized=False), AddedToken(NORMAL, normalized=True)])
    directory: Path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return ChatTemplate(directory)


TEXTS = st.lists(st.sampled_from((PLAIN, INSIDE, LEFT, RIGHT, WORD, NORMAL, *WORDS)), max_size=12).map("".join)


@given(text=TEXTS)
@example(text=PLAIN + " the" + LEFT + "  " + "x" * LONG + " " + LEFT)
@example(text="the" + PLAIN + " y" * LONG + RIGHT + "  \n" + PLAIN + "b" + " y" * LONG)
@settings(deadline=None, max_examples=150)
def test_pieces_are_the_whole(template: ChatTemplate, text: str) -> None:
    pieces = TokenCache(template)
    first = pieces.encode(text).tolist()
    assert first == template.encode(text) == pieces.encode(text).tolist()


@given(text=TEXTS, after=st.sampled_from((PLAIN, RIGHT)))
@settings(deadline=None, max_examples=150)
def test_what_stands_behind_a_marker_is_the_rest_of_the_whole(template: ChatTemplate, text: str, after: str) -> None:
    (marker,) = template.encode(after)
    whole = template.encode(f"the{after}{text}")
    ids = TokenCache(template).encode(text, after=marker).tolist()
    if (after + text).startswith(INSIDE):  # then it is another marker
        return
    assert [*template.encode("the"), marker, *ids] == whole


def test_a_long_piece_is_tokenised_once(template: ChatTemplate) -> None:
    """A second text that shares pieces with the first adds only its own pieces to what is remembered."""
    pieces = TokenCache(template)
    shared = f"{PLAIN}{'the house ' * LONG}"
    pieces.encode(f"{shared}{PLAIN}{'the mouse ' * LONG}")
    assert len(pieces.pieces) == 2
    pieces.encode(f"{shared}{PLAIN}{'the end ' * LONG}")
    assert len(pieces.pieces) == 3


def test_ever_new_texts_stay_under_the_bound(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts used least recently go first; one that is longer than the bound is not remembered."""
    monkeypatch.setattr(token_cache, "MOST_BYTES", 40_000)
    pieces = TokenCache(template)
    shared = f"{PLAIN}{'the é mouse ' * LONG}"
    for number in range(50):
        text = f"{shared}{PLAIN}{number}{' the house' * LONG}"
        assert pieces.encode(text).tolist() == template.encode(text)
        assert pieces.size == sum(size for _, size in pieces.pieces.values()) <= 40_000
    assert shared in pieces.pieces and 1 < len(pieces.pieces) < 10
    pieces.encode(f"{PLAIN}{' the' * 20_000}")
    assert (pieces.size, len(pieces.pieces)) == (0, 0)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[PromptBuilder]:
    """The builder of each request that a gateway prepares, in order."""
    seen: list[PromptBuilder] = []
    prepare = Session.prepare

    def seeing(session: Session, *how: Any, **more: Any) -> Any:
        seen.append(session.prompts)
        return prepare(session, *how, **more)

    monkeypatch.setattr(Session, "prepare", seeing)
    return seen


async def test_what_is_counted_or_refused_takes_no_memory(
    serve: Serve, prompts: list[PromptBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MOST_BYTES", 40_000)
    monkeypatch.setattr(history, "MOST_BYTES", 20_000)
    stand = await serve(lambda prompt, ids: "done", context_length=200)
    bodies = [{"model": "m", "max_tokens": 9, "messages": [user(f"{i}{' word' * 1000}")]} for i in range(9)]
    for body in bodies:
        assert (await stand.ask("/v1/messages/count_tokens", body))["input_tokens"] > 1000
    assert prompts[-1].size == 0
    for body in bodies:
        assert (await stand.ask("/v1/messages", body))["status"] == 400
        assert 0 < prompts[-1].size <= 60_000
    assert len({id(each) for each in prompts}) == 1 and stand.recorded() == []


async def test_a_session_is_forgotten_for_its_remembered_texts(
    serve: Serve, prompts: list[PromptBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "KEEP_BYTES", 10_000)
    stand = await serve(lambda prompt, ids: "done", context_length=200)
    for key, text in (("one", "hi"), ("two", "hi"), ("one", "word " * 4000), ("three", "hi"), ("one", "hi")):
        await stand.chat(user(text), key=key)
    one, two, long, three, other_one = prompts
    assert long is one and len({id(each) for each in (one, two, three, other_one)}) == 4
