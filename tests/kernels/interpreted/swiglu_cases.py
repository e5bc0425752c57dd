"""Cases of the expert MLP's Triton kernels for the interpreter; run by test_grouped_mlp_parity.py.

The matrix products are torch's: the interpreter has no say in them.
"""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels import grouped_mlp
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.moe_permute import combine_into
from megacomposer.kernels.moe_permute_triton import gather_rows
from megacomposer.kernels.moe_routing import routing_map_torch
from megacomposer.kernels.swiglu import swiglu as torch_swiglu
from megacomposer.kernels.swiglu import swiglu_backward as torch_backward
from megacomposer.kernels.swiglu_triton import swiglu, swiglu_backward

BF16 = torch.bfloat16
DTYPES = [BF16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 7), (8, 256), (19, 300), (9, 513)]


@pytest.fixture(autouse=True)
def _triton_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")


def _inputs(rows: int, inner: int, dtype: torch.dtype):
    torch.manual_seed(rows + inner)
    hidden = (torch.randn(rows, 2 * inner) * 3).to(dtype)
    return hidden, torch.rand(rows), torch.randn(rows, inner).to(dtype)


def _gradients(fn, hidden, probs, dactivation, *, in_place: bool = False):
    hidden = hidden.clone()
    dhidden = hidden if in_place else torch.empty_like(hidden)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    dprobs = None if probs is None else torch.empty(hidden.shape[0], dtype=wide)
    activation = torch.empty_like(dactivation)
    fn(dactivation, hidden, probs, dhidden, activation, dprobs)
    return [t for t in (dhidden, activation, dprobs) if t is not None]


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_swiglu_is_at_most_twice_as_wrong_as_torch(
    rows: int, inner: int, dtype: torch.dtype, with_probs: bool
) -> None:
    hidden, probs, dactivation = _inputs(rows, inner, dtype)
    probs = probs if with_probs else None
    wide = [t if t is None else t.double() for t in (hidden, probs, dactivation)]
    exact = [torch_swiglu(*wide[:2]), *_gradients(torch_backward, *wide)]
    theirs = [torch_swiglu(hidden, probs), *_gradients(torch_backward, hidden, probs, dactivation)]
    ours = [swiglu(hidden, probs), *_gradients(swiglu_backward, hidden, probs, dactivation)]
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        limit = 2 * relative_error(b, e) + 2e-7
        # The interpreter cuts to bf16 where a GPU rounds: up to a whole epsilon.
        assert relative_error(a, e) <= (torch.finfo(dtype).eps if a.dtype == BF16 else limit)


def test_gradient_in_place_equals_the_one_beside() -> None:
    inputs = _inputs(11, 300, torch.bfloat16)
    beside = _gradients(swiglu_backward, *inputs)
    in_place = _gradients(swiglu_backward, *inputs, in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(beside, in_place, strict=True))


def test_what_is_not_wanted_is_not_written() -> None:
    hidden, probs, dactivation = _inputs(5, 24, torch.float32)
    full = _gradients(swiglu_backward, hidden, probs, dactivation)
    dhidden = torch.empty_like(hidden)
    swiglu_backward(dactivation, hidden, probs, dhidden, None, None)
    assert torch.equal(dhidden, full[0])


def test_large_gates_do_not_overflow() -> None:
    hidden = torch.tensor([[-1e4, 1e4, -3e38, 100.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(swiglu(hidden, None), torch_swiglu(hidden, None))
    ones = torch.ones(1, 4)
    for a, b in zip(
        _gradients(swiglu_backward, hidden, None, ones),
        _gradients(torch_backward, hidden, None, ones),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["dense", "column_slice", "transposed", "expanded"])
def test_gathered_rows_are_bit_exact(layout: str) -> None:
    torch.manual_seed(0)
    x = {
        "dense": lambda: torch.randn(6, 70),
        "column_slice": lambda: torch.randn(6, 100)[:, 20:90],
        "transposed": lambda: torch.randn(70, 6).T,
        "expanded": lambda: torch.randn(()).expand(6, 70),
    }[layout]()
    tokens = torch.tensor([5, 0, 0, 3])
    got = gather_rows(x, tokens)
    assert got.is_contiguous()
    assert torch.equal(got, x[tokens])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("choices", [1, 3])
def test_sum_of_a_part_fills_its_columns_alone_with_the_bits_of_torch(
    choices: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    first, rows = 24, torch.randn(11, 40).to(dtype)
    row_of = first + torch.randperm(12).view(-1, choices)  # one pair has no row

    def total(override: str) -> torch.Tensor:
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", override)
        out = torch.full((len(row_of), 70), torch.nan, dtype=dtype)
        combine_into(out[:, 16:56], rows, row_of, first)
        return out

    got = total("triton")
    terms = torch.cat([rows.double(), torch.zeros(1, 40)])[row_of - first]
    torch.testing.assert_close(got[:, 16:56], terms.sum(1).to(dtype))
    assert got[:, :16].isnan().all()
    assert got[:, 56:].isnan().all()
    assert torch.equal(got[:, 16:56], total("torch")[:, 16:56])


def _results(fn, operands, map, grad):
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    y = fn(*leaves[:3], map, leaves[3])
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves)]


def _layer(tokens: int, choices: int, hidden: int = 96, inner: int = 40):
    torch.manual_seed(0)
    ids = torch.randint(5, (tokens, choices))
    ids[ids == 3] = 4  # an expert without rows
    map = routing_map_torch(ids, 5)
    operands = [
        torch.randn(tokens, hidden),
        torch.randn(5, 2 * inner, hidden) / hidden**0.5,
        torch.randn(5, hidden, inner) / inner**0.5,
        torch.rand(tokens, choices),
    ]
    return operands, map, torch.randn(tokens, hidden)


@pytest.mark.parametrize("gather_bytes", [2**28, 5 * 96 * 4])
@pytest.mark.parametrize("choices", [1, 3])
def test_layer_matches_the_formula(
    choices: int, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", gather_bytes)
    operands, map, grad = _layer(7, choices)
    exact = _results(grouped_swiglu_reference, [t.double() for t in operands], map, grad.double())
    for a, e in zip(_results(grouped_swiglu, operands, map, grad), exact, strict=True):
        assert relative_error(a, e) < 2e-6


def test_second_backward_is_refused_as_the_first_has_overwritten_what_it_needs() -> None:
    operands, map, grad = _layer(4, 2)
    operands[0].requires_grad_()
    y = grouped_swiglu(*operands[:3], map, operands[3])
    y.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_zero_tokens_keep_the_graph_and_give_zero_weight_gradients() -> None:
    operands, _, grad = _layer(4, 2)
    map = routing_map_torch(torch.empty(0, 2, dtype=torch.int64), 5)
    operands[0], operands[3] = operands[0][:0], operands[3][:0]
    y, dx, dgate_up, ddown, dprobs = _results(grouped_swiglu, operands, map, grad[:0])
    assert y.shape == dx.shape == (0, 96)
    assert dprobs.shape == (0, 2)
    assert not dgate_up.any()
    assert not ddown.any()
