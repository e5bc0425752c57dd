"""Routing map, permute and combine in Triton on a GPU: bits of torch, repeats, int64 offsets."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.moe_permute import (
    combine,
    combine_reference,
    permute,
    permute_reference,
)
from megacomposer.kernels.moe_routing import (
    RoutingMap,
    routing_map,
    routing_map_reference,
    routing_map_torch,
)

DEVICE = torch.device("cuda")
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
ROUTINGS = ["uniform", "zipf", "one_expert", "empty"]


@pytest.fixture(autouse=True)
def _table_on_an_allocator_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves NaN, as an index far out of range, in the blocks that torch hands out next."""
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    blocks = [torch.full((2**exponent,), float("nan"), device=DEVICE) for exponent in range(8, 25)]
    torch.cuda.synchronize()
    del blocks


def _ids(kind: str, tokens: int, choices: int, experts: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    if kind == "one_expert":
        return torch.full((tokens, choices), experts - 1, device=DEVICE)
    weights = torch.ones(experts, device=DEVICE)
    if kind == "zipf":
        weights = torch.arange(1, experts + 1, device=DEVICE) ** -1.2
    if kind == "empty":
        weights[: max(1, experts * 3 // 10)] = 0.0
    pairs = torch.multinomial(weights, tokens * choices, True, generator=generator)
    return pairs.view(tokens, choices)


def _assert_same(ours: RoutingMap, plain: RoutingMap) -> None:
    for name in ("order", "token_of_row", "row_of_TK", "rows_per_expert"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(1, 1, 2), (129, 1, 7), (32768, 8, 128), (20_001, 6, 512), (5000, 3, 1537), (90_000, 8, 384)],
)
def test_map_equals_that_of_a_stable_sort(
    kind: str, tokens: int, choices: int, experts: int
) -> None:
    ids = _ids(kind, tokens, choices, experts)
    _assert_same(routing_map(ids, experts), routing_map_torch(ids, experts))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_map_of_strided_ids_of_any_dtype_equals_the_plain_one(dtype: torch.dtype) -> None:
    ids = _ids("uniform", 16, 150, 100).to(dtype).T
    _assert_same(routing_map(ids[:, ::3], 300), routing_map_reference(ids[:, ::3], 300))


def test_map_beyond_2_31_pairs_does_not_wrap() -> None:
    """Every token takes experts 1, 0, 0, 0, 0, 0, 0, 0, so each row is known; the ids need no
    memory, the map 52 GB."""
    tokens = 2**28 + 77
    ids = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0]], device=DEVICE, dtype=torch.uint8)
    routing = routing_map(ids.expand(tokens, 8), 3)
    assert routing.rows_per_expert.tolist() == [7 * tokens, tokens, 0]
    for token in (0, 2**27 + 5, 2**28, tokens - 1):
        first = 8 * token
        assert routing.order[7 * tokens + token] == first
        assert routing.order[7 * token : 7 * token + 7].tolist() == [*range(first + 1, first + 8)]
        rows = [7 * tokens + token, *range(7 * token, 7 * token + 7)]
        assert routing.row_of_TK[token].tolist() == rows
        assert (routing.token_of_row[rows] == token).all()


def test_id_of_no_expert_is_a_device_side_assertion() -> None:
    """In processes of their own, whose contexts it ends."""
    processes = []
    for bad in (-1, 7, 2**32):
        lines = [
            "import torch",
            "from megacomposer.kernels.moe_routing import routing_map",
            f"routing_map(torch.tensor([[0, 3], [6, {bad}]], device='cuda'), 7)",
            "torch.cuda.synchronize()",
        ]
        command = [sys.executable, "-c", "\n".join(lines)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, text=True, **pipes))
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode != 0
        assert "an expert id is outside 0..num_experts-1" in output


def _case(tokens: int, choices: int, hidden: int, dtype: torch.dtype):
    generator = torch.Generator(DEVICE).manual_seed(hidden)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, hidden, device=DEVICE, generator=generator).to(dtype)

    routing = routing_map(_ids("zipf", tokens, choices, 16), 16)
    probs = torch.rand(tokens, choices, device=DEVICE, generator=generator)
    return (
        routing,
        [normal(tokens), normal(tokens * choices), probs],
        [
            normal(tokens * choices),
            normal(tokens),
        ],
    )


def _results(permute_fn, combine_fn, routing, operands, grads) -> list[torch.Tensor]:
    """Permuted rows, combined rows, and the gradients of x, rows and (if given) probs."""
    leaves = [t.detach().requires_grad_() for t in operands]
    out = combine_fn(leaves[1], routing, operands[0].shape[0], *leaves[2:])
    outs = [permute_fn(leaves[0], routing), out]
    return [*(t.detach() for t in outs), *torch.autograd.grad(outs, leaves, grads)]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    (1, 1, 1, BF16),
    (700, 1, 64, FP32),
    (1000, 6, 1025, BF16),
    (300, 11, 192, FP16),
    (2000, 8, 2048, BF16),
    (2000, 8, 2048, FP16),
    (2000, 8, 2048, FP32),
    (501, 16, 2056, BF16),
    (600, 8, 7168, BF16),
    (100, 3, 20_000, BF16),
    (100, 3, 20_000, FP32),
]


@pytest.mark.parametrize(("tokens", "choices", "hidden", "dtype"), CASES)
def test_without_probs_every_bit_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, choices: int, hidden: int, dtype: torch.dtype
) -> None:
    routing, (x, rows, _), grads = _case(tokens, choices, hidden, dtype)
    ours = _results(permute, combine, routing, (x, rows), grads)
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "torch")
    theirs = _results(permute, combine, routing, (x, rows), grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("tokens", "choices", "hidden", "dtype"), CASES)
def test_error_is_at_most_twice_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, choices: int, hidden: int, dtype: torch.dtype
) -> None:
    routing, operands, grads = _case(tokens, choices, hidden, dtype)
    wide = [[t.double() for t in tensors] for tensors in (operands, grads)]
    exact = _results(permute_reference, combine_reference, routing, *wide)
    ours = _results(permute, combine, routing, operands, grads)
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "torch")
    theirs = _results(permute, combine, routing, operands, grads)
    names = ("rows", "out", "dx", "drows", "dprobs")
    for name, a, b, e in zip(names, ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + 1e-7, name


def test_combine_is_at_most_half_as_wrong_as_a_bfloat16_scatter_add() -> None:
    routing, (_, rows, _), _ = _case(2000, 16, 512, torch.bfloat16)
    exact = combine_reference(rows.double(), routing, 2000)
    scattered = torch.zeros(2000, 512, device=DEVICE, dtype=torch.bfloat16)
    scattered.index_add_(0, routing.token_of_row, rows)
    error = relative_error(combine(rows, routing, 2000), exact)
    assert error <= relative_error(scattered, exact) / 2


@pytest.mark.parametrize("layout", ["column_slice", "misaligned", "transposed", "expanded"])
def test_strided_operands_and_gradients_equal_dense_ones(layout: str) -> None:
    make = {
        "column_slice": lambda t: torch.cat([t[:, :8], t, t[:, :3]], dim=1)[:, 8:-3],
        "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
        "transposed": lambda t: t.T.contiguous().T,
        "expanded": lambda t: t[:1, :1].expand_as(t),
    }[layout]
    routing, operands, grads = _case(300, 8, 2048, torch.bfloat16)
    operands, grads = ([make(t) for t in tensors] for tensors in (operands, grads))
    strided = _results(permute, combine, routing, operands, grads)
    dense = [[t.contiguous() for t in tensors] for tensors in (operands, grads)]
    *others, dprobs = _results(permute, combine, routing, *dense)
    assert all(torch.equal(a, b) for a, b in zip(strided, others, strict=False))
    torch.testing.assert_close(strided[-1], dprobs, rtol=1e-4, atol=1e-3)


def test_zero_tokens_keep_the_graph_and_give_zero_gradients() -> None:
    routing = routing_map(torch.empty(0, 8, dtype=torch.int64, device=DEVICE), 5)
    assert routing.rows_per_expert.tolist() == [0] * 5
    scale = torch.ones(64, device=DEVICE, requires_grad=True)
    x = torch.empty(0, 64, device=DEVICE)
    probs = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    combine(permute(x * scale, routing), routing, 0, probs).sum().backward()
    assert torch.equal(scale.grad, torch.zeros_like(scale))
    assert probs.grad.shape == (0, 8)


def _layer(ids, x, probs, grad) -> list[torch.Tensor]:
    routing = routing_map(ids, 64)
    out = combine(permute(x, routing), routing, x.shape[0], probs)
    tensors = (routing.order, routing.token_of_row, routing.row_of_TK, routing.rows_per_expert)
    return [*tensors, out.detach(), *torch.autograd.grad(out, (x, probs), grad)]


def _layer_operands() -> list[torch.Tensor]:
    _, (x, _, probs), (_, grad) = _case(3000, 8, 1024, torch.bfloat16)
    return [_ids("zipf", 3000, 8, 64), x.requires_grad_(), probs.requires_grad_(), grad]


def test_hundred_runs_are_bit_equal() -> None:
    operands = _layer_operands()
    first = _layer(*operands)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, _layer(*operands), strict=True))


def test_nothing_waits_for_the_device() -> None:
    operands = _layer_operands()
    _layer(*operands)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        _layer(*operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_graph_follows_new_ids() -> None:
    """Forward and backward in one CUDA graph, replayed with ids that it has not seen."""
    ids, *others = _layer_operands()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _layer(ids, *others)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _layer(ids, *others)
    for kind in ("uniform", "one_expert", "empty"):
        ids.copy_(_ids(kind, 3000, 8, 64))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, _layer(ids, *others), strict=True))


def test_rows_beyond_2_31_elements_do_not_wrap_offsets() -> None:
    """38,000 tokens x 8 choices x 7168: the last rows start past element 2^31."""
    tokens, choices, hidden = 38_000, 8, 7168
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    routing = routing_map(_ids("uniform", tokens, choices, 16), 16)
    rows = permute(x, routing)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-5:], x[routing.token_of_row[-5:]])
    out = combine(rows, routing, tokens)
    eightfold = (8 * x.detach().float()).bfloat16()
    assert torch.equal(out, eightfold)
    out.backward(x.detach())
    assert torch.equal(x.grad, eightfold)
    del out, eightfold
    rows = rows.detach().requires_grad_()
    probs = torch.full((tokens, choices), 0.5, device=DEVICE, requires_grad=True)
    combine(rows, routing, tokens, probs).backward(x.detach())
    assert torch.equal(rows.grad[-5:], rows[-5:].detach() / 2)
    squares = x.detach()[-100:].double().square().sum(dim=1, keepdim=True)
    torch.testing.assert_close(probs.grad[-100:], squares.float().expand(-1, choices))
