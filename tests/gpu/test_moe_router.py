"""Router on a GPU: the CPU's choice, no wait for the device, and the same bits every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.moe_router import (
    RouterRule,
    Routing,
    load_balance_loss,
    probability_sums,
    route,
    z_loss,
)
from megacomposer.model.router import _Logits, _parts

DEVICE = torch.device("cuda")
SOFTMAX = RouterRule(num_chosen=8, score="softmax")
SIGMOID = RouterRule(num_chosen=8, score="sigmoid", scale=2.5, num_groups=8, topk_groups=4)
RULES = {
    "softmax": (SOFTMAX, 128),
    "sigmoid, groups": (SIGMOID, 256),
    "sigmoid, 384": (dataclasses.replace(SIGMOID, num_groups=0), 384),
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(
    rule: RouterRule, experts: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Logits in steps of 1/8, so that many scores tie, a bias, and ids of which a part is wrong."""
    generator = torch.Generator().manual_seed(experts)
    logits = (2 * torch.randn(tokens, experts, generator=generator) * 8).round() / 8
    bias = torch.randn(experts, generator=generator) / 4 if rule.score == "sigmoid" else None
    wild = torch.randint(-2, experts + 2, (tokens, rule.num_chosen), generator=generator)
    own = route(logits, rule, bias).ids_TK
    return logits, bias, torch.where(torch.rand(own.shape, generator=generator) < 0.8, own, wild)


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def gradient(logits: torch.Tensor, routing: Routing, rule: RouterRule) -> torch.Tensor:
    load = torch.full((logits.shape[1],), 1 / logits.shape[1], device=logits.device)
    loss = load_balance_loss(probability_sums(logits, rule.score), load) + z_loss(logits)
    return torch.autograd.grad(routing.gates_TK.square().sum() + loss, logits)[0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("replayed", [False, True])
def test_choice_differs_from_the_cpus_or_waits_for_the_device(name: str, replayed: bool) -> None:
    rule, experts = RULES[name]
    logits, bias, given = inputs_of(rule, experts, 4099)
    # Rounding of a sigmoid may turn an order on one side; its ties are tested on the CPU.
    if rule.score == "sigmoid":
        logits += 0.1 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
    expected = route(logits, rule, bias, given if replayed else None)
    device_logits, device_bias, device_given = on_device(logits, bias, given)
    assert device_logits is not None
    device_logits.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = route(device_logits, rule, device_bias, device_given if replayed else None)
        gradient(device_logits, found, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same = (found.ids_TK.cpu() == expected.ids_TK).all(dim=1)
    if rule.score == "softmax":
        assert bool(same.all())
    assert float(same.float().mean()) > 0.999
    gates = found.gates_TK.cpu()[same]
    torch.testing.assert_close(gates, expected.gates_TK[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", RULES)
def test_runs_or_parts_of_a_batch_differ_in_a_bit(name: str, deterministic: None) -> None:
    rule, experts = RULES[name]
    logits, bias, given = on_device(*inputs_of(rule, experts, 4099))
    assert logits is not None
    logits.requires_grad_()
    first = route(logits, rule, bias, given)
    first_gradient = gradient(logits, first, rule)
    for _ in range(100):
        again = route(logits, rule, bias, given)
        assert torch.equal(again.ids_TK, first.ids_TK)
        assert torch.equal(again.gates_TK, first.gates_TK)
        assert torch.equal(gradient(logits, again, rule), first_gradient)
    assert given is not None
    parts = [
        route(part, rule, bias, ids)
        for part, ids in zip(logits.split(1000), given.split(1000), strict=True)
    ]
    assert torch.equal(torch.cat([part.ids_TK for part in parts]), first.ids_TK)
    assert torch.equal(torch.cat([part.gates_TK for part in parts]), first.gates_TK)


def test_logits_of_bfloat16_are_rounded_more_than_float32_ones() -> None:
    """Tensor cores sum in float32, which they cut instead of rounding (2e-6 seen), and the gradient
    comes to them in two parts."""
    torch.manual_seed(0)
    x = torch.randn(4096, 2048, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(128, 2048, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    grad = torch.randn(4096, 128, device=DEVICE)
    logits = _Logits.apply(x, weight)
    exact = x.detach().double() @ weight.detach().double().t()
    assert logits.dtype == torch.float32
    assert relative_error(logits, exact) < 1e-5
    dx, dweight = torch.autograd.grad(logits, (x, weight), grad)
    rounding = 2**-8
    assert relative_error(dx, grad.double() @ weight.detach().double()) < rounding
    assert relative_error(dweight, grad.double().t() @ x.detach().double()) < rounding
    parts = [part.double() for part in _parts(grad, x)]
    assert relative_error(parts[0] + parts[1], grad) < 2**-15
