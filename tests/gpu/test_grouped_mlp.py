"""The expert MLP of a mixture-of-experts layer on a GPU, as the table dispatches it (on Hopper
CUDA C++) and in Triton around `torch._grouped_mm`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megacomposer.kernels import grouped_mlp
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.moe_routing import RoutingMap, routing_map

DEVICE = torch.device("cuda")
HIDDEN, INNER, EXPERTS = 256, 384, 16
ROUTINGS = ["random", "all to one", "few experts", "one token", "one choice"]
NAMES = ("y", "dx", "dgate_up", "ddown", "dprobs")


@pytest.fixture(autouse=True)
def _allocator_full_of_nan() -> None:
    """Leaves NaN in the blocks that torch hands out next."""
    blocks = [torch.full((2**exponent,), float("nan"), device=DEVICE) for exponent in range(10, 24)]
    torch.cuda.synchronize()
    del blocks


@pytest.fixture(params=["table", "table, ranges", "triton", "triton, ranges"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by table or in Triton, on all at once or a part: results in blocks of 64 columns and,
    in Triton, 300 gathered rows, which end inside of experts."""
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    if "triton" in request.param:
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")
    if "ranges" in request.param:
        monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", 300 * HIDDEN * 2)


def _map(routing: str) -> RoutingMap:
    generator = torch.Generator(DEVICE).manual_seed(3)
    tokens = 1 if routing == "one token" else 700
    choices = 1 if routing == "one choice" else 4
    ids = torch.randint(EXPERTS, (tokens, choices), device=DEVICE, generator=generator)
    if routing == "all to one":
        ids.fill_(EXPERTS - 2)
    if routing == "few experts":
        ids = ids % 3 * 5
    return routing_map(ids, EXPERTS)


def _operands(map: RoutingMap, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, gate_up, down, probs and the gradient of the result."""
    generator = torch.Generator(DEVICE).manual_seed(4)
    experts = map.rows_per_expert.shape[0]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    return [
        normal(map.num_tokens, HIDDEN).to(dtype),
        (normal(experts, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype),
        (normal(experts, HIDDEN, INNER) / INNER**0.5).to(dtype),
        normal(*map.row_of_TK.shape).sigmoid(),
        normal(map.num_tokens, HIDDEN).to(dtype),
    ]


def _torch_mlp(x, gate_up, down, map, probs):
    """One expert after the other, and the sum over a token's rows in fp32."""
    counts = map.rows_per_expert.tolist()
    outs = []
    parts = zip(
        x[map.token_of_row].split(counts), probs.flatten()[map.order].split(counts), strict=True
    )
    for expert, (rows, prob) in enumerate(parts):
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=1)
        activation = (F.silu(gate) * up * prob[:, None]).to(x.dtype)
        outs.append(F.linear(activation, down[expert]))
    return torch.cat(outs)[map.row_of_TK].float().sum(dim=1).to(x.dtype)


def _results(fn, map, x, gate_up, down, probs, grad) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate_up, down, probs)]
    y = fn(*leaves[:3], map, leaves[3])
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_error_is_at_most_twice_that_of_a_torch_loop(routing, dtype, way) -> None:
    map = _map(routing)
    operands = _operands(map, dtype)
    exact = _results(grouped_swiglu_reference, map, *(t.double() for t in operands))
    theirs = _results(_torch_mlp, map, *operands)
    ours = _results(grouped_swiglu, map, *operands)
    for name, a, b, e in zip(NAMES, ours, theirs, exact, strict=True):
        # The gradient of a few probabilities has few elements: a few roundings of its own.
        floor = 4 * torch.finfo(torch.float32).eps
        assert relative_error(a, e) <= 2 * relative_error(b, e) + floor, name


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_without_rows_get_exactly_zero_weight_gradients(routing, way) -> None:
    map = _map(routing)
    _, _, dgate_up, ddown, _ = _results(grouped_swiglu, map, *_operands(map))
    has_rows = map.rows_per_expert > 0
    for gradient in (dgate_up, ddown):
        assert torch.equal(gradient.flatten(1).any(dim=1), has_rows)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("experts", [1, 3])
def test_zero_tokens_give_zero_weight_gradients(experts: int) -> None:
    map = routing_map(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), experts)
    y, dx, dgate_up, ddown, dprobs = _results(grouped_swiglu, map, *_operands(map))
    assert y.shape == dx.shape == (0, HIDDEN)
    assert dprobs.shape == (0, 2)
    assert not dgate_up.any()
    assert not ddown.any()


@pytest.mark.parametrize("experts", [1, 2])
def test_rows_past_the_last_expert_are_refused_not_left_as_garbage(experts: int) -> None:
    """A buffer padded past the sum of the splits gave NaN gradients of weights
    (TransformerEngine issue 3484): here the first operand of a product is never longer."""
    script = f"""
import torch
from megacomposer.kernels.grouped_products import GroupedMm
counts = torch.full(({experts},), 3, device="cuda")
GroupedMm(counts, {3 * experts}, {experts})
torch.cuda.synchronize()
print("accepted")
GroupedMm(counts, {3 * experts} + 1, {experts})
torch.cuda.synchronize()
print("not refused")
"""
    result = _run_alone(script)
    assert "accepted" in result.stdout
    assert "not refused" not in result.stdout
    assert "Assertion" in result.stderr or "assert" in result.stderr


def _run_alone(script: str) -> subprocess.CompletedProcess[str]:
    """A device-side assertion ends the process that meets it."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_expanded_gradient_equals_the_dense_one(way) -> None:
    map = _map("random")
    *operands, grad = _operands(map)
    ones = torch.ones_like(grad)
    dense = _results(grouped_swiglu, map, *operands, ones)
    expanded = _results(grouped_swiglu, map, *operands, ones[:1, :1].expand_as(ones))
    assert all(torch.equal(a, b) for a, b in zip(dense, expanded, strict=True))


def test_misaligned_and_strided_operands_equal_dense_ones(way) -> None:
    map = _map("random")
    x, gate_up, down, probs, grad = _operands(map)
    strided = [
        torch.cat([x[:, :3], x], dim=1)[:, 3:],
        torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up),
        down.mT.contiguous().mT,
    ]
    strided_grad = torch.cat([grad[:, :5], grad], dim=1)[:, 5:]

    def run(operands, grad):
        leaves = [t.detach().requires_grad_() for t in operands]
        y = grouped_swiglu(*leaves, map, probs)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    for a, b in zip(run(strided, strided_grad), run((x, gate_up, down), grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("hidden", "inner"), [(1025, 40), (200, 12), (24, 1026)])
def test_widths_that_no_vector_access_divides_are_right(hidden: int, inner: int) -> None:
    """K = 1025 made `_grouped_mm` fail (transformers issue 48644); the loop takes over there."""
    map = _map("random")
    generator = torch.Generator(DEVICE).manual_seed(5)
    x, gate_up, down, probs, grad = (
        torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
        for shape in (
            (map.num_tokens, hidden),
            (EXPERTS, 2 * inner, hidden),
            (EXPERTS, hidden, inner),
            map.row_of_TK.shape,
            (map.num_tokens, hidden),
        )
    )
    operands = (x, gate_up / hidden**0.5, down / inner**0.5, probs, grad)
    exact = _results(grouped_swiglu_reference, map, *(t.double() for t in operands))
    theirs = _results(_torch_mlp, map, *operands)
    for a, b, e in zip(_results(grouped_swiglu, map, *operands), theirs, exact, strict=True):
        assert relative_error(a, e) <= 2 * relative_error(b, e) + 1e-6


def test_hundred_runs_are_bit_equal(way) -> None:
    map = _map("random")
    operands = _operands(map)
    first = _results(grouped_swiglu, map, *operands)
    for _ in range(100):
        again = _results(grouped_swiglu, map, *operands)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_whole_layer_waits_for_the_device_nowhere(way) -> None:
    ids = torch.randint(EXPERTS, (500, 2), device=DEVICE)
    operands = [t.requires_grad_() for t in _operands(routing_map(ids, EXPERTS))[:4]]

    def run() -> None:
        map = routing_map(ids, EXPERTS)
        grouped_swiglu(*operands[:3], map, operands[3]).square().mean().backward()

    run()  # compiles, and asks for the device's capability
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_second_backward_is_refused_not_wrong(way) -> None:
    map = _map("random")
    x, gate_up, down, probs, grad = _operands(map)
    y = grouped_swiglu(x.requires_grad_(), gate_up, down, map, probs)
    y.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_weights_beyond_2_31_elements_do_not_wrap_offsets() -> None:
    """512 experts of 4096 x 1024 (Liger issue 1296); all rows are of the last two."""
    experts, hidden, inner = 512, 4096, 1024
    gate_up = torch.zeros(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16)
    down = torch.zeros(experts, hidden, inner, device=DEVICE, dtype=torch.bfloat16)
    assert gate_up.numel() > 2**31
    used = slice(experts - 2, experts)
    gate_up[used].normal_(std=hidden**-0.5)
    down[used].normal_(std=inner**-0.5)
    x = torch.randn(64, hidden, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.randint(2, (64, 2), device=DEVICE)
    probs, grad = torch.rand(64, 2, device=DEVICE), torch.randn_like(x)
    big = _results(
        grouped_swiglu, routing_map(ids + experts - 2, experts), x, gate_up, down, probs, grad
    )
    small = _results(grouped_swiglu, routing_map(ids, 2), x, gate_up[used], down[used], probs, grad)
    for a, b in zip(big, small, strict=True):
        part = a if a.shape == b.shape else a[used]
        torch.testing.assert_close(part, b)
    assert not big[2][:-2].any()
    assert not big[3][:-2].any()


@pytest.mark.parametrize("gather_bytes", [2**28, 2**33], ids=["ranges", "whole"])
def test_rows_beyond_2_31_elements_do_not_wrap_offsets(
    gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R I, 2 R I and R H past 2^31, at 300,000 rows: the last rows against a call of their own."""
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", gather_bytes)
    tokens, choices, hidden, inner = 37_500, 8, 7168, 7168
    gate_up = torch.randn(1, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16) / hidden**0.5
    down = torch.randn(1, hidden, inner, device=DEVICE, dtype=torch.bfloat16) / inner**0.5
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(tokens, choices, device=DEVICE, requires_grad=True)
    map = routing_map(torch.zeros(tokens, choices, dtype=torch.int64, device=DEVICE), 1)
    y = grouped_swiglu(x, gate_up, down, map, probs)
    grad = torch.randn_like(y)
    y.backward(grad)
    last = slice(tokens - 100, tokens)
    few = routing_map(torch.zeros(100, choices, dtype=torch.int64, device=DEVICE), 1)
    expected = _results(grouped_swiglu, few, x[last], gate_up, down, probs[last], grad[last])
    for a, b in ((y, 0), (x.grad, 1), (probs.grad, 4)):
        assert relative_error(a[last], expected[b]) < torch.finfo(torch.bfloat16).eps
