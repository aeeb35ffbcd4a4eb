"""Every wrong setting fails before anything starts, in one sentence with the value, the rule and the way out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.pool.errors import UserError
from tests.trainer.make import write_model
from trainer.commands.main import main, parse
from trainer.config import load_config
from trainer.config.model_shape import read_shape
from trainer.loss.named_losses import configured
from trainer.loss.ratios import Window

SMALLEST = 'pool = "pool.db"\nrun = "r"\nmodel = "model"\noutput = "out"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.toml"
    path.write_text(SMALLEST)
    return path


def test_the_smallest_file_and_its_relative_paths(file: Path) -> None:
    config = load_config(file)
    assert config.model == str(file.parent / "model") and config.loss.bounds == (0.0, 5.0)


def test_overrides_are_read_as_toml_or_as_a_word(file: Path) -> None:
    config = load_config(file, ["optimizer.lr=5e-4", "run=other", 'push.engines=["http://127.0.0.1:1"]'])
    assert (config.optimizer.lr, config.run, config.push.engines) == (5e-4, "other", ("http://127.0.0.1:1",))


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        ("groups=16", "windowed: groups 16, window 20, queue_limit 64, max_staleness 5 (none gets over 5 steps old)"),
        ("window=2", "windowed: groups 8, window 2, queue_limit 32, max_staleness 4 (none gets over 4 steps old)"),
        ("schedule='synchronous'", "synchronous: groups 8, window 8, queue_limit 8, max_staleness 0 (none gets over 0"),
        ("schedule='overlap'", "overlap: groups 8, window 8, queue_limit 16, max_staleness 2 (none gets over 2"),
        ("schedule='strict', queue_limit=20", "strict: groups 8, window 1, queue_limit 20, max_staleness 2 (none"),
        (
            "schedule='greedy', max_staleness=3",
            "window none, queue_limit 32, max_staleness 3 (older rollouts are dropped)",
        ),
        # what files said before there were schedules
        (
            "window=16, queue_limit=16, max_staleness=4",
            "windowed: groups 8, window 16, queue_limit 16, max_staleness 4",
        ),
    ],
)
def test_a_schedule_sets_the_numbers_of_the_queue(batch: str, numbers: str, file: Path) -> None:
    assert numbers in load_config(file, [f"batch={{{batch}}}"]).batch.text()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch.groups=0", "batch.groups = 0: expected `int` >= 1; correct it"),
        ("batch={window=9, schedule='strict'}", "window = 9 is for batch.schedule = windowed, and that is strict"),
        ("batch={window=33}", "window = 33 is wider than the queue, which holds 32 groups.*schedule = greedy for no"),
        ("batch={queue_limit=9, schedule='synchronous'}", "queue_limit = 9 is not batch.groups = 8.*set .* to overlap"),
        (
            "batch={max_staleness=4}",
            r"would drop .* windowed .* 5 steps old.*= \(32 \+ 10 - 2\) / 8, rounded down; raise",
        ),
        ("batch={window=16, queue_limit=16, max_staleness=2}", r"up to 3 steps old: .*\(16 \+ 16 - 2\) / 8"),
        ("batch={schedule='overlap', max_staleness=1}", r"overlap makes up to 2 steps old"),
        ("batch.schedule=greedy", "greedy needs batch.max_staleness"),
        (
            "batch.schedule=fifo",
            "schedule = 'fifo' is unknown; choose from synchronous, overlap, windowed, strict, gre",
        ),
        ("batch.queue_limit=3", "batch.queue_limit = 3 is below batch.groups = 8"),
        ("batch.max_staleness=-1", "batch.max_staleness = -1: expected `int` >= 0"),
        (
            "batch.labels=['main', 'title']",
            "batch.labels\\[1\\] = 'title' is unknown; choose from main, subagent, side, compaction",
        ),
        ("loss.floor=6", "loss.floor = 6.0 and loss.cap = 5.0"),
        ("loss.kind=grpo", "loss.kind = 'grpo' is unknown; choose from cispo"),
        (
            "loss.correction=tis",
            "loss.correction = tis is for .* = cispo compares with .* corrects the mismatch already",
        ),
        ("loss={kind='gspo', level='token'}", "loss.level = token is for ratios against recomputed .*gspo compares"),
        ("loss={kind='decoupled_ppo', mismatch=0.5}", "loss.mismatch = 0.5: expected `float` >= 1"),
        (
            "loss={kind='decoupled_ppo', cap=5.0}",
            "loss.cap = 5.0 bounds policy / old .* which is 1 in the only update of a batch; set .* or remove it",
        ),
        ("loss={kind='decoupled_ppo', floor=0}", "loss.floor = 0.* bounds policy / old .* in the only update"),
        ("loss.mismatch=2", "loss.mismatch = 2.0 is not used by loss.kind = cispo"),
        ("loss.kl_steps_ago=2", "loss.kl_steps_ago = 2 is the reference of loss.kl, which is 0"),
        ("loss={kl=0.1, kl_steps_ago=2}", "keep_checkpoints = 2 deletes the policy of loss.kl_steps_ago = 2.* to 3 or"),
        ("loss={kl=0.1, kl_steps_ago=1, kl_model='m'}", "loss.kl_model = .*m and .*= 1 are two references"),
        (
            "loss={kl=0.1, kl_model='out/models/step-000001'}",
            "is a model that keep_checkpoints deletes; copy it elsewhere",
        ),
        ("loss.minibatches=0", "loss.minibatches = 0: expected `int` >= 1"),
        ("loss.norm=constant", "loss.norm_constant = 0.0"),
        ("loss.norm=mixed", "norm_constant = 0.0 mixes nothing .* 0 is norm = rollout .* above 0 and below 1"),
        ("loss={norm='mixed', norm_constant=1}", "norm_constant = 1.0 mixes nothing .* 1 is norm = token; set it"),
        ("loss.kind=dppo_tv", "loss.cap = 5.0 masks nothing with loss.kind = dppo_tv"),
        ("loss={kind='tis', floor=0.5}", "loss.floor = 0.5 is not used by loss.kind = tis"),
        ("loss.norm_constant=0.5", "loss.norm_constant = 0.5 is not used by loss.norm = token"),
        ("credit.baseline=aligned", "credit.baseline = aligned is for returns per turn.*outcome; set that to turns"),
        ("credit.scale=domain", "credit.scale = domain is for returns per turn"),
        ("credit.process_weight=0.5", "credit.process_weight = 0.5 is for returns per turn.*outcome; set that"),
        (
            "credit.overlong_margin=4",
            "credit.overlong_margin = 4 is a margin below credit.overlong_limit, which is not set; set it, or remove",
        ),
        ("loss.kl=-1", "loss.kl = -1: expected `float` >= 0"),
        ("loss.negative_weight=2", "loss.negative_weight = 2: expected `float` <= 1"),
        ("optimizer.lr=0", "optimizer.lr = 0: expected `float` > 0"),
        ("optimizer.betas=[0.9, 1.0]", "unknown key `betas`"),
        ("batch.function=filters.short", "batch.function = 'filters.short'"),
        ('batch.function="a:b\\n"', "batch.function = "),
        ("optimizer.eps=0", "optimizer.eps = 0: expected `float` >= 1e-22"),
        ("optimizer.eps=1e-40", "optimizer.eps = 1e-40: expected `float` >= 1e-22"),
        ("optimizer.clip=-1", "optimizer.clip = -1: expected `float` >= 0"),
        ("optimizer.min_lr=1", "optimizer.min_lr = 1.0 is above optimizer.lr"),
        (
            "optimizer={min_lr=1e-7, lr=1e-6}",
            "optimizer.min_lr = 1e-07 is not used by optimizer.decay = constant; set that to linear or cosine, or",
        ),
        ("parallel.precision=float16", "parallel.precision = 'float16' is unknown; choose from float32, bfloat16"),
        ("parallel.tensor=2", "parallel.processes = 1 is no multiple of parallel.tensor = 2"),
        ("parallel.context=2", "no multiple of parallel.tensor = 1 times parallel.context = 2"),
        ("parallel.pipeline=2", "context = 1 times parallel.pipeline = 2; change one"),
        ("loss.balance=-1", "loss.balance = -1"),
        ("parallel.expert=2", "no multiple of parallel.expert = 2 times parallel.pipeline = 1"),
        ("mtp.drafts=-1", "mtp.drafts = -1: expected `int` >= 0"),
        ("mtp.lr=-1", "mtp.lr = -1: expected `float` >= 0"),
        ("mtp.lr=0.1", "mtp.lr = 0.1 is of the head that mtp.drafts = 0 does not train; set that above 0, or remove"),
        ("mtp.lr=0", "mtp.lr = 0.0 is of the head"),
        ("mtp.heads=1", "unknown key `heads`.*drafts, lr"),
        ("push.engines=['127.0.0.1:1']", "not an http URL"),
        ("push.engines=['http://a:1', 'http://a:1']", "names http://a:1 twice"),
        ("push.engines=['http://a:1', 'http://a:1/']", "names http://a:1 twice"),
        ("push.quorum=2", "none of 1 to 1 engines"),
        ("push.timeout_seconds=0", "push.timeout_seconds = 0: expected `float` > 0"),
        ("push={way='distributed', colocated=true}", "push.colocated denies them"),
        ("keep_checkpoints=0", "keep_checkpoints = 0"),
        ("batch.grops=1", "unknown key `grops`.*groups, schedule, window"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': expected `float`, got `str`"),
        ("steps", "write --set section.key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_a_way_out(override: str, sentence: str, file: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config(file, [override])


def test_bounds_of_policy_over_old_are_taken_where_a_batch_has_several_updates(file: Path) -> None:
    for several in ("minibatches=2", "epochs=2"):
        loss = load_config(file, [f"loss={{kind='decoupled_ppo', floor=0.8, cap=1.2, mismatch=2, {several}}}"]).loss
        assert (loss.updates, loss.mismatch, configured(loss).correction) == (
            2,
            2,
            Window(high=2, outside="zero", closed=True),
        )


def test_ratios_of_completions_are_refused_where_ranks_cut_them(file: Path) -> None:
    cut = ["parallel.processes=2", "parallel.context=2"]
    for loss in ("{kind='gspo'}", "{kind='cispo_completion'}", "{kind='decoupled_ppo', level='sequence'}"):
        with pytest.raises(
            UserError, match="takes ratios over whole completions, which parallel.context = 2 would cut"
        ):
            load_config(file, [*cut, f"loss={loss}"])
    assert not load_config(file, [*cut, "loss={kind='ipa', level='token'}"]).loss.by_completion


def test_an_estimator_that_returns_per_turn_would_pass_over_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="loss.advantage = rloo is not used by credit.returns = turns"):
        load_config(file, ["loss.advantage=rloo", "credit.returns=turns"])


def test_refill_is_refused_where_groups_of_equal_rewards_teach(file: Path) -> None:
    with pytest.raises(
        UserError, match="batch.refill skips groups .* and credit.baseline = none learns from those too"
    ):
        load_config(file, ["batch.refill=true", "credit={returns='turns', baseline='none'}"])


def test_an_mtp_head_needs_its_trees_whole(file: Path) -> None:
    for name in ("context", "pipeline"):
        with pytest.raises(UserError, match=f"mtp.drafts = 1 needs all layers and tokens on one rank.*{name} = 2"):
            load_config(file, ["parallel.processes=2", f"parallel.{name}=2", "mtp.drafts=1"])


def test_the_command_line_prints_one_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file.parent / 'model' / 'config.json'} cannot be read")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            '"model_type": "qwen3"',
            '"model_type": "gpt2"',
            "model_type gpt2; the trainer maps llama, mimo, qwen2, qwen3",
        ),
        ('"attention_bias": false', '"attention_bias": true', "attention_bias = True"),
        ('"hidden_act": "silu"', '"hidden_act": "gelu"', "hidden_act gelu"),
        ('"rope_theta": 10000.0', '"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}', "rope type yarn"),
    ],
)
def test_a_model_that_is_not_mapped_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model") / "config.json"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(UserError, match=sentence):
        read_shape(config.parent)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"num_experts_per_tok": 3', '"num_experts_per_tok": 9', "num_experts_per_tok = 9 of 8 experts"),
        ('"num_experts_per_tok": 3', '"num_experts_per_tok": 1', "the router's weight is always 1"),
        ('"num_experts": 8, ', "", "lacks num_experts, which the trainer needs"),
        ('"tie_word_embeddings": false', '"tie_word_embeddings": true', "SGLang 0.5.23's qwen3_moe does not tie"),
    ],
)
def test_a_mixture_that_is_not_mapped_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "qwen3_moe") / "config.json"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(UserError, match=sentence):
        read_shape(config.parent)


@pytest.mark.parametrize(
    ("changes", "layers", "width"),
    [
        ({"decoder_sparse_step": 2}, (False, True), (64 + 3 * 16) / 2),
        ({"mlp_only_layers": [1]}, (True, False), (64 + 3 * 16) / 2),
        ({"num_local_experts": 8, "num_experts": None}, (True, True), 3 * 16),
    ],
)
def test_which_layers_have_experts(
    changes: dict[str, object], layers: tuple[bool, ...], width: float, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", "qwen3_moe") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    shape = read_shape(path.parent)
    assert shape.experts is not None and (shape.experts.layers, shape.experts.count) == (layers, 8)
    assert shape.token_ffn() == width


@pytest.mark.parametrize("changes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1]}])
def test_without_experts_the_model_is_dense(changes: dict[str, object], tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen3_moe") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert read_shape(path.parent).experts is None


def test_ranks_are_passed_on_as_settings(file: Path) -> None:
    command = parse(["launch", str(file), "--nproc", "2", "--steps", "3"])
    assert command.arguments == ["launch", str(file), "--set=steps=3", "--set=parallel.processes=2"]


def test_the_command_line_does_not_load_torch() -> None:
    code = "import sys, trainer.commands.main; print('torch' in sys.modules or 'megatron' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
