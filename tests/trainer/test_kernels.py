"""The inputs of the GPU's kernels against the dense mask and the CPU's kernel; their forward pass on a CPU.

Not covered here: MagiAttention itself and FlexAttention's backward pass, which need a GPU (benchmarks/gpu.py).
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from proxy.pool.terminal import progress
from tests.trainer.test_tree import TREE, dense, row, rows_of
from trainer.data.tree import TokenRun, build
from trainer.megatron.attention import magi
from trainer.megatron.attention.flex import block_mask, compiled, flexible, show_compiling
from trainer.megatron.attention.kernels import tree_attention
from trainer.megatron.attention.layout import AttentionLayout

CPU = torch.device("cpu")


def layout_of(seed: int, longest: int, stretch: tuple[float, float] = (0, 1)) -> AttentionLayout:
    """The layout of a random tree; `stretch`: the range of its queries as fractions of its tokens."""
    runs = tuple(build(rows_of(seed, count=12, vocabulary=2, longest=longest)).runs)
    first, end = (int(share * runs[-1].end) for share in stretch)
    return AttentionLayout(runs, (first, end))


def wide_layout(seed: int, stretch: tuple[float, float] = (0, 1)) -> AttentionLayout:
    """The layout of a history of several blocks, with branches of up to three blocks."""
    draw = random.Random(seed)
    history = [draw.randrange(90) for _ in range(900)]
    rows = [row(history, draw)]
    for _ in range(3):
        tail = [draw.randrange(90) for _ in range(draw.randint(50, 400))]
        rows.append(row(history[: draw.randrange(900)] + tail, draw))
    runs = tuple(build(rows).runs)
    return AttentionLayout(runs, (int(stretch[0] * runs[-1].end), int(stretch[1] * runs[-1].end)))


def allowed(layout: AttentionLayout) -> Tensor:
    """[queries, all tokens] the dense mask."""
    last = torch.tensor([run.last for run in layout.runs for _ in range(run.start, run.end)])
    query, key = torch.arange(*layout.queries)[:, None], torch.arange(len(last))[None]
    return (key <= query) & (query < last[None])


def test_the_slices_of_the_worked_example() -> None:
    runs = (
        TokenRun(0, 1, 8, 0),
        TokenRun(1, 2, 6, 1),
        TokenRun(2, 4, 4, 2),
        TokenRun(4, 6, 6, 2),
        TokenRun(6, 8, 8, 1),
    )
    queries, keys, kinds = magi.ranges(AttentionLayout(runs, (0, 8)))
    parts = [[list(query), list(key), kind] for query, key, kind in zip(queries, keys, kinds, strict=True)]
    assert sorted(parts, key=str) == sorted(TREE["slices"], key=str)


@pytest.mark.parametrize("stretch", [(0, 1), (0, 0.4), (0.4, 1), (0.3, 0.6)])
@pytest.mark.parametrize("seed", range(10))
def test_slices_give_the_dense_mask_once(seed: int, stretch: tuple[float, float]) -> None:
    """As MagiAttention reads them: a causal slice allows key j to query i if i - j >= its difference of lengths."""
    layout = layout_of(seed, 40, stretch)
    counts = torch.zeros(allowed(layout).shape, dtype=torch.long)
    for query, key, kind in zip(*magi.ranges(layout), strict=True):
        size, width = query[1] - query[0], key[1] - key[0]
        assert size > 0 and width > 0
        part = torch.ones(size, width, dtype=torch.long)
        counts[slice(*query), slice(*key)] += part.tril(width - size) if kind == magi.CAUSAL else part
    assert torch.equal(counts, allowed(layout).long())


def blocks(mask: BlockMask) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Two sets of (query block, key block): partly allowed, and fully allowed."""
    blocks = []
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
        blocks.append({(row, column) for row, (count, columns) in enumerate(rows) for column in columns[:count]})
    return blocks[0], blocks[1]


@pytest.mark.parametrize("stretch", [(0, 1), (0.4, 0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_judged_by_their_ends(seed: int, stretch: tuple[float, float]) -> None:
    layout = wide_layout(seed, stretch)
    dense_mask = allowed(layout)
    queries, keys = dense_mask.shape
    expected = create_block_mask(lambda b, h, q, k: dense_mask[q, k], None, None, queries, keys, device="cpu")
    (some, every), (right, throughout) = blocks(block_mask(layout, CPU)), blocks(expected)
    assert every == throughout and some >= right and len(throughout) > 3 and len(right) > 10
    border = {(row, column) for row, column in some - right}
    assert stretch != (0, 1) or not border
    assert all(128 * column + 128 > layout.queries[0] + 128 * row for row, column in border)


def test_a_mask_takes_no_memory_of_tokens_squared() -> None:
    """A history of 60,000 tokens: a dense mask would have 3.6 GB, the block mask has some hundred thousand blocks."""
    layout = AttentionLayout((TokenRun(0, 60_000, 60_000, 0),), (0, 60_000))
    mask = block_mask(layout, CPU)
    assert mask.full_kv_num_blocks is not None
    rows = 60_000 // 128  # and one that is cut, of which no block is whole
    assert mask.full_kv_num_blocks.sum() == rows * (rows - 1) // 2 and mask.kv_num_blocks.sum() == 2 * rows + 1


def tensors(layout: AttentionLayout, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    size = layout.runs[-1].end
    query, key, value = (torch.randn(1, heads, size, 16, generator=draw) for heads in (4, 2, 2))
    return [query[:, :, slice(*layout.queries)], key, value]


@pytest.mark.parametrize("seed", range(3))
def test_flexible_attention_is_that_of_the_dense_mask(seed: int) -> None:
    layout = layout_of(seed, 60)
    q, k, v = tensors(layout, seed)
    with torch.no_grad():
        output = flexible(q, k, v, layout, 0.3)
    torch.testing.assert_close(output, dense(q, k, v, layout, 0.3), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output, tree_attention(q, k, v, layout, 0.3), rtol=1e-5, atol=1e-5)


def test_one_sees_that_torch_compiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.05)

    def slow(module: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        time.sleep(0.5)
        return module.forward

    show_compiling()
    double = torch.compile(lambda x: x * 2, backend=slow, dynamic=False)
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert capsys.readouterr().err.startswith("compiling the attention kernel: ")
    assert double(torch.ones(2)).tolist() == [2, 2] and capsys.readouterr().err == ""  # compiled once


@pytest.mark.long
@pytest.mark.parametrize("stretch", [(0, 1), (0.3, 0.8)])
def test_the_compiled_kernel_takes_the_blocks_at_their_word(stretch: tuple[float, float]) -> None:
    """Only what the blocks list is computed there, unlike in torch's reference. For one length: torch 2.13 writes C++
    that does not compile where queries and keys are of any number."""
    layout = wide_layout(5, stretch)
    q, k, v = tensors(layout, 1)
    kernel = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        output = kernel(q, k, v, block_mask=block_mask(layout, CPU), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, tree_attention(q, k, v, layout, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("stretches", [[(0, 1)] * 3, [(0.4, 0.9), (0.1, 0.7), (0, 0.6)]], ids=["whole", "stretches"])
def test_one_compilation_serves_trees_of_all_shapes(stretches: list[tuple[float, float]]) -> None:
    """What the compiler makes is not run: torch's own operations compute in its place."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    kernel = torch.compile(flex_attention, backend=counter, dynamic=True)
    for seed, stretch in enumerate(stretches):
        layout = wide_layout(seed, stretch)
        query, key, value = tensors(layout, 1)
        mask = block_mask(layout, CPU)
        with torch.no_grad():
            kernel(query.contiguous(), key, value, block_mask=mask, scale=0.3, enable_gqa=True)
    assert counter.frame_count == 1


def test_a_ninth_case_is_compiled_as_well_in_a_thread_of_autograd() -> None:
    """torch ends with an error after 8 compilations of one function, as an H200 has shown. Threads have own limits."""
    compiled()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    double = torch.compile(lambda x: x * 2, backend=counter, dynamic=False, fullgraph=True)

    def compute(sizes: range) -> list[float]:
        compiled()
        return [double(torch.ones(size)).sum().item() for size in sizes]

    with ThreadPoolExecutor(1) as thread:
        assert compute(range(2, 8)) == [2 * size for size in range(2, 8)]
        assert thread.submit(compute, range(8, 14)).result() == [2 * size for size in range(8, 14)]
    assert counter.frame_count == 12


@pytest.mark.parametrize("complete", [True, False], ids=["whole", "PyPI's empty package"])
def test_magi_attention_is_taken_where_it_is_and_fits(
    complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "magi_attention").mkdir()
    (tmp_path / "magi_attention" / "__init__.py").touch()
    if complete:
        (tmp_path / "magi_attention" / "api").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    half, wide = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 256, dtype=torch.bfloat16)
    assert magi.fits(half) == complete
    assert not magi.fits(half.float()) and not magi.fits(wide)
