from __future__ import annotations

import random

import numpy
import pytest
import torch

from megacomposer.checkpoint.rng import capture_rng, restore_rng


def draw() -> list[float]:
    """From every generator, Gaussians included: both libraries keep a spare one."""
    values = [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]
    values += [
        torch.rand(()).item(),
        torch.randn(()).item(),
        torch.nn.Dropout()(torch.ones(9)).sum(),
    ]
    if torch.cuda.is_available():
        values.append(torch.rand((), device="cuda").item())
    return [float(value) for value in values]


@pytest.mark.parametrize("draws_before", [0, 1, 2])
def test_every_generator_goes_on_as_if_never_interrupted(draws_before) -> None:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    for _ in range(draws_before):  # an odd number leaves a spare Gaussian behind
        draw()
    state = capture_rng()
    uninterrupted = [draw() for _ in range(5)]
    random.seed(4)
    numpy.random.seed(5)
    torch.manual_seed(6)
    assert [draw() for _ in range(5)] != uninterrupted
    restore_rng(state)
    assert [draw() for _ in range(5)] == uninterrupted


def test_a_generator_of_the_callers_own_comes_back_too() -> None:
    generator = torch.Generator().manual_seed(7)
    state = capture_rng({"sampler": generator.get_state()})
    uninterrupted = torch.rand(4, generator=generator)
    generator.manual_seed(8)
    generator.set_state(restore_rng(state)["sampler"])
    assert torch.equal(torch.rand(4, generator=generator), uninterrupted)


def test_a_capture_is_not_changed_by_later_draws() -> None:
    own = torch.zeros(2)
    state = capture_rng({"own": own})
    copy = {name: tensor.clone() for name, tensor in state.items()}
    draw()
    own += 1
    assert all(torch.equal(state[name], copy[name]) for name in state)


def test_the_random_state_of_another_kind_of_device_is_refused_and_changes_nothing() -> None:
    state = capture_rng()
    if "torch/cuda" in state:
        del state["torch/cuda"]
    else:
        state["torch/cuda"] = torch.zeros(16, dtype=torch.uint8)
    before = capture_rng()
    draw()
    after = capture_rng()
    with pytest.raises(ValueError, match="same kind of device"):
        restore_rng(state)
    assert all(torch.equal(capture_rng()[name], after[name]) for name in after)
    assert not all(torch.equal(before[name], after[name]) for name in after)
