"""Expert rows and the grouped expert MLP on a GPU, through `torch._grouped_mm`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.moe_permute import combine, permute
from megacomposer.kernels.moe_routing import routing_map, routing_map_reference

DEVICE = torch.device("cuda")
HIDDEN, INNER = 256, 384
COUNTS = [[700, 1, 0, 130, 257], [0, 0, 900, 0], [1], [64] * 16, [0, 5, 3]]


@pytest.fixture(autouse=True)
def _allocator_full_of_nan() -> None:
    """Leaves NaN in the blocks that torch hands out next."""
    blocks = [torch.full((2**exponent,), float("nan"), device=DEVICE) for exponent in range(10, 24)]
    torch.cuda.synchronize()
    del blocks


def _operands(counts: list[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(sum(counts))
    rows, experts = sum(counts), len(counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    return [
        normal(rows, HIDDEN).to(dtype),
        (normal(experts, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype),
        (normal(experts, HIDDEN, INNER) / INNER**0.5).to(dtype),
        torch.tensor(counts, device=DEVICE),
        normal(rows).sigmoid(),
        normal(rows, HIDDEN).to(dtype),
    ]


def _torch_mlp(x, gate_up, down, rows_per_expert, probs):
    outs = []
    parts = zip(
        x.split(rows_per_expert.tolist()), probs.split(rows_per_expert.tolist()), strict=True
    )
    for expert, (rows, prob) in enumerate(parts):
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=1)
        activation = (F.silu(gate) * up * prob[:, None]).to(x.dtype)
        outs.append(F.linear(activation, down[expert]))
    return torch.cat(outs)


def _results(fn, x, gate_up, down, counts, probs, grad) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate_up, down, probs)]
    y = fn(*leaves[:3], counts, leaves[3])
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_error_is_at_most_twice_that_of_a_torch_loop(counts, dtype) -> None:
    operands = _operands(counts, dtype)
    wide = [t.double() if t.is_floating_point() else t for t in operands]
    exact = _results(grouped_swiglu_reference, *wide)
    theirs = _results(_torch_mlp, *operands)
    ours = _results(grouped_swiglu, *operands)
    for name, a, b, e in zip(("y", "dx", "dgu", "dd", "dp"), ours, theirs, exact, strict=True):
        # A single probability has a one-element gradient: allow it a few roundings of its own.
        floor = 4 * torch.finfo(torch.float32).eps
        assert relative_error(a, e) <= 2 * relative_error(b, e) + floor, name


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_without_rows_get_exactly_zero_weight_gradients(counts) -> None:
    _, _, dgate_up, ddown, _ = _results(grouped_swiglu, *_operands(counts))
    for expert, rows in enumerate(counts):
        assert bool(dgate_up[expert].any()) == (rows > 0)
        assert bool(ddown[expert].any()) == (rows > 0)


def test_zero_rows_give_zero_weight_gradients() -> None:
    y, dx, dgate_up, ddown, dprobs = _results(grouped_swiglu, *_operands([0, 0, 0]))
    assert y.shape == dx.shape == (0, HIDDEN)
    assert dprobs.shape == (0,)
    assert not dgate_up.any()
    assert not ddown.any()


def test_expanded_gradient_equals_the_dense_one() -> None:
    operands = _operands(COUNTS[0])
    ones = torch.ones_like(operands[5])
    dense = _results(grouped_swiglu, *operands[:5], ones)
    expanded = _results(grouped_swiglu, *operands[:5], ones[:1, :1].expand_as(ones))
    assert all(torch.equal(a, b) for a, b in zip(dense, expanded, strict=True))


def test_misaligned_and_strided_operands_equal_dense_ones() -> None:
    x, gate_up, down, counts, probs, grad = _operands(COUNTS[0])
    strided = [
        torch.cat([x[:, :3], x], dim=1)[:, 3:],
        torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up),
        down.mT.contiguous().mT,
    ]

    def run(operands):
        leaves = [t.detach().requires_grad_() for t in operands]
        y = grouped_swiglu(*leaves, counts, probs)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    for a, b in zip(run(strided), run((x, gate_up, down)), strict=True):
        torch.testing.assert_close(a, b)


def test_runs_repeat_bit_for_bit() -> None:
    operands = _operands(COUNTS[0])
    first = _results(grouped_swiglu, *operands)
    for _ in range(20):
        again = _results(grouped_swiglu, *operands)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_routing_map_equals_the_plain_one() -> None:
    ids = torch.randint(40, (300, 8), device=DEVICE)
    ours, plain = routing_map(ids, 40), routing_map_reference(ids, 40)
    for name, value in vars(ours).items():
        assert torch.equal(value, getattr(plain, name)), name


def _layer(x, ids, probs, gate_up, down):
    routing = routing_map(ids, gate_up.shape[0])
    row_probs = probs.reshape(-1)[routing.order]
    rows = grouped_swiglu(permute(x, routing), gate_up, down, routing.rows_per_expert, row_probs)
    return combine(rows, routing, x.shape[0])


def test_whole_layer_waits_for_the_device_nowhere() -> None:
    ids = torch.randint(5, (500, 2), device=DEVICE)
    x, gate_up, down, _, probs, grad = _operands([100] * 5)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, probs)]

    def run() -> None:
        probs_TK = torch.stack([probs, 1 - probs], dim=1)
        out = _layer(x, ids, probs_TK, gate_up, down)
        torch.autograd.grad(out, leaves, grad)

    run()  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_whole_layer_repeats_bit_for_bit() -> None:
    ids = torch.randint(5, (500, 2), device=DEVICE)
    x, gate_up, down, _, probs, grad = _operands([100] * 5)
    probs_TK = torch.stack([probs, 1 - probs], dim=1)
    leaves = [t.requires_grad_() for t in (x, probs_TK, gate_up, down)]

    def run() -> list[torch.Tensor]:
        out = _layer(x, ids, probs_TK, gate_up, down)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_rows_beyond_2_31_elements_do_not_wrap_offsets() -> None:
    """38,000 tokens x 8 choices x 7168: the last rows start past element 2^31."""
    tokens, choices, hidden = 38_000, 8, 7168
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    routing = routing_map(torch.randint(16, (tokens, choices), device=DEVICE), 16)
    rows = permute(x, routing)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-5:], x[routing.token_of_row[-5:]])
    out = combine(rows, routing, tokens)
    assert torch.equal(out, (8 * x.float()).bfloat16())
    out.backward(x.detach())
    assert torch.equal(x.grad, (8 * x.float()).bfloat16())
