"""Ids become text one by one with decoders that change earlier text, as those with ByteFallback do."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.models import WordLevel

from proxy.engine.scripted import ScriptedReply
from proxy.pool.browse.tokens.texts import texts
from tests.proxy.conftest import Serve, user

BYTES = ("<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
NEWLINE, FIRST, *REST = range(5)
X = 5


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({text: id for id, text in enumerate((*BYTES, "x", "?"))}, unk_token="?"))
    tokenizer.decoder = Sequence([ByteFallback(), Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([NEWLINE, FIRST, *REST, X], ["\n", "", "", "", "😀", "x"]),
        ([NEWLINE, FIRST, X, X], ["\n", "", "�x", "x"]),
        ([NEWLINE, FIRST, FIRST, X, NEWLINE, X], ["\n", "", "", "��x", "\n", "x"]),
        ([FIRST, X, NEWLINE], ["", "�x", "\n"]),
    ],
)
def test_bytes_that_are_no_character_change_nothing_that_was_shown(
    tokenizer: Tokenizer, ids: list[int], shown: list[str]
) -> None:
    assert texts(tokenizer, ids) == shown


async def test_such_bytes_are_no_error_of_the_call(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    described = json.loads((tiny_model / "tokenizer.json").read_text())
    first = max(token["id"] for token in described["added_tokens"]) + 1
    added = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    described["added_tokens"] += [{"id": first + n, "content": text, **added} for n, text in enumerate(BYTES)]
    described["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    shutil.copytree(tiny_model, model := tmp_path / "byte-fallback")
    (model / "tokenizer.json").write_text(json.dumps(described))
    x = described["model"]["vocab"]["x"]
    stand = await serve(lambda prompt, ids: ScriptedReply("", ids=(first, first + 1, x)), model=model)
    answer = await stand.chat(user("hi"))
    (row,) = stand.recorded()
    assert row.sampled.tolist()[:3] == [first, first + 1, x] and row.finish_reason == "stop"
    assert row.reply["content"] == "\n�x" and row.untrainable is None, answer
