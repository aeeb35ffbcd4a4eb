"""What prefix trees and prefix caches save in a group of an agent with a long prompt.

An unmodified agent, installed as `harness agents install` does it, works at one task in a group. First before a
scripted engine, so that every member takes several turns: how many tokens the trainer computes for these rollouts call
by call, joined to sequences, and as prefix trees. Then before SGLang with a tiny random model, which says how many
prompt tokens it found in its cache; noise ends an attempt after a call or two. Prints one JSON object as the last line.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
# Python looks in a script's own directory first, and there benchmarks/trainer.py would hide the package trainer.
sys.path[:1] = [str(ROOT), str(ROOT / "examples" / "demo")]

from commands import Background, run_command  # noqa: E402

from benchmarks.result import provenance, write_result  # noqa: E402
from proxy.pool.database import open_pool  # noqa: E402
from proxy.pool.rollouts.runs import find_run  # noqa: E402
from proxy.pool.training.finished_rollouts import RecordedRollout, finished_rollouts  # noqa: E402
from trainer.config.model_shape import read_shape  # noqa: E402
from trainer.data.assemble import merge  # noqa: E402
from trainer.report.flops import flops, merged, separate  # noqa: E402

TASK = {
    "id": "hello",
    "instruction": "Write hello.txt and check it",
    "verifier": {"command": 'test "$(cat hello.txt)" = hello', "timeout": 60},
    "timeout": 600,
}


def trees(rollouts: list[RecordedRollout], model: Path) -> dict[str, Any]:
    """What the trainer computes for the members of a group, in three ways, and how often it computes less as trees."""
    rows = [row for one in rollouts for row in merge(one.completions, 0.0, Counter(), lambda item: None)]
    calls = [item.prompt_length + len(item.sampled) - 1 for one in rollouts for item in one.completions]
    trained = sum(len(row.places) for row in rows)
    alone, joined, tree = separate(calls, trained), separate([row.inputs for row in rows], trained), merged(rows)
    shape = read_shape(model)
    return {
        "calls": len(calls),
        "first_prompt_tokens": min(one.completions[0].prompt_length for one in rollouts),
        "sampled_tokens": trained,
        "call_tokens": alone.tokens,
        "sequence_tokens": joined.tokens,
        "tree_tokens": tree.tokens,
        "tokens_saved_against_calls": alone.tokens / tree.tokens,
        "tokens_saved_against_sequences": joined.tokens / tree.tokens,
        "flops_saved_against_calls": flops(shape, alone) / flops(shape, tree),
    }


def recorded(pool_file: Path, run: str, members: int) -> list[RecordedRollout]:
    """The rollouts of a group. SystemExit where fewer than `members` called the model: figures are of whole groups."""
    pool = open_pool(str(pool_file), create=False)
    try:
        calling = [one for one in finished_rollouts(pool, find_run(pool, run).id) if one.completions]
    finally:
        pool.close()
    if len(calling) < members:
        raise SystemExit(
            f"only {len(calling)} of {members} rollouts of the run {run!r} called the model, so the group is not whole "
            "and nothing is reported; start the benchmark again"
        )
    return calling


def measure(directory: Path, agent: str, members: int) -> dict[str, Any]:
    """The figures of a group of `members` rollouts."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK) + "\n")
    common = [str(tasks), "--agent", agent, "--sandbox", "process", "-n", str(members), "--concurrency", "2"]
    script = ["--scripted", f"{ROOT / 'tests/harness/scripts.py'}:hello"]
    where = ["--run-dir", str(directory / "scripted")]
    run_command(["harness", "run", *common, *script, *where], directory / "scripted.log")
    rollouts = recorded(directory / "scripted" / "pool.db", "scripted", members)
    done = trees(rollouts, directory / "scripted" / "model")
    return {"agent": agent, "members": members, "trees": done, "cache": cache(directory, common, members)}


def cache(directory: Path, common: list[str], members: int) -> dict[str, Any]:
    """How many of a group's prompt tokens SGLang finds in its cache."""
    model, config = directory / "scripted" / "model", directory / "engine.toml"
    config.write_text(
        f'pool = "real.db"\n[engine]\nmodel = "{model}"\ndtype = "float32"\nextra_args = ["--max-total-tokens", '
        '"131072"]\n[sampling]\nmax_new_tokens = 64\n'
    )
    engine = Background(["proxy", "engine", str(config)], directory / "engine.log", directory / "engine.ready")
    try:
        url = engine.wait_ready()["url"]
        serve = ["proxy", "serve", str(config), "--engine", url]
        gateway = Background(serve, directory / "proxy.log", directory / "proxy.ready")
        try:
            proxy = gateway.wait_ready()["url"]
            where = ["--run-dir", str(directory / "real"), "--proxy", proxy]
            run_command(["harness", "run", *common, *where], directory / "real.log")
            with urlopen(f"{proxy}/health") as answer:
                (replica,) = json.load(answer)["replicas"]
        finally:
            gateway.stop()
    finally:
        engine.stop()
    rollouts = recorded(directory / "real.db", "real", members)
    calls = sum(len(one.completions) for one in rollouts)
    prompt, cached = replica["prompt_tokens"], replica["cached_tokens"]
    return {"calls": calls, "prompt_tokens": prompt, "cached_tokens": cached, "cached_share": cached / prompt}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", default="codex", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a group of two")
    parser.add_argument("--members", type=int, default=8, help="rollouts of the group (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    members = 2 if arguments.quick else arguments.members
    with tempfile.TemporaryDirectory(prefix="blackforge-prefixes-") as directory:
        figures = provenance("prefixes.py") | measure(Path(directory), arguments.agent, members)
    write_result(figures, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
