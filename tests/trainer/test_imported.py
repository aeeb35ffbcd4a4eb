"""ATIF documents as demonstrations: which tokens a warm start learns of them, and that it does."""

import json
from pathlib import Path
from typing import Any

import msgspec

from proxy.commands.main import main
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.database import open_pool
from proxy.pool.inspect.account import account
from proxy.prompt.template import ChatTemplate
from tests.trainer.make import make_config
from trainer.commands.recorded_rows import demonstrations
from trainer.commands.sft import warm_start
from trainer.config import Sft
from trainer.megatron.parallel import Ranks

CALL = {"tool_call_id": "c1", "function_name": "shell", "arguments": {"command": "ls"}}


def document(name: str) -> dict[str, Any]:
    """One of another agent: two answers of a model, and between them one that a program wrote."""
    agent = {"name": "other", "version": "1"}
    steps: list[dict[str, Any]] = [
        {"source": "system", "message": "Be good."},
        {"source": "user", "message": f"Look for {name}."},
        {"source": "agent", "message": "Looking.", "tool_calls": [CALL]},
        {"source": "agent", "message": "A program says so.", "llm_call_count": 0},
        {"source": "agent", "message": "Done."},
    ]
    steps[2]["observation"] = {"results": [{"source_call_id": "c1", "content": f"{name}.txt"}]}
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return {"schema_version": "ATIF-v1.8", "session_id": name, "agent": agent, "steps": numbered}


def test_a_warm_start_learns_the_answers_of_documents(ranks: Ranks, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    lines = "".join(json.dumps(document(name)) + "\n" for name in ("a", "b"))
    (tmp_path / "documents.jsonl").write_text(lines)
    config = make_config(tmp_path, sft=Sft(runs=("teacher",), output=str(tmp_path / "warm"), batch=2, max_steps=1))
    words = [config.pool, "teacher", str(tmp_path / "documents.jsonl"), "--model", config.model]
    assert main(["pool", "import", *words]) == 0
    template = ChatTemplate(tmp_path / "model")
    [[first], [second]] = demonstrations(config)
    learned = [template.decode(row.tokens[row.trained].tolist()) for row in (first, second)]
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    assert learned == [f"Looking.\n{call}<|im_end|>Done.<|im_end|>"] * 2
    assert "a.txt" in template.decode(first.tokens.tolist()) and "A program" in template.decode(first.tokens.tolist())
    done = warm_start(config, ranks)
    assert (done["rows"], done["held_out_rows"], done["step"]) == (1, 1, 1)
    assert (tmp_path / "warm" / "model.safetensors").exists()
    now = account(open_pool(config.pool), 1)
    assert now.unaccounted == 0 and now.imitated.tokens == int(first.trained.sum())
    assert not main(["pool", "account", config.pool, "teacher"])
    assert msgspec.json.encode(done["loss"])


def test_an_answer_that_was_cut_is_not_learned(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    cut = document("a")
    cut["steps"][-1]["metrics"] = {"extra": {"blackforge": {"finish_reason": "length"}}}
    (tmp_path / "cut.jsonl").write_text(f"{json.dumps(cut)}\n{json.dumps(document('b'))}\n")
    config = make_config(tmp_path, sft=Sft(runs=("teacher",), output=str(tmp_path / "warm")))
    words = [config.pool, "teacher", str(tmp_path / "cut.jsonl"), "--model", config.model]
    assert main(["pool", "import", *words]) == 0
    template = ChatTemplate(tmp_path / "model")
    learned = [template.decode(row.tokens[row.trained].tolist()) for [row] in demonstrations(config)]
    assert ["Done." in text for text in learned] == [False, True]
