"""A small regression on which two optimizers can be compared: gradients, updates, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.model.parameters import Matrix, ParameterShard

INPUTS, HIDDEN, OUTPUTS = 32, 96, 24
_BATCH = 256
Step = Callable[[], None]
Make = Callable[[Sequence[torch.nn.Parameter]], Step]
"""Given the weights, a function that updates them from their gradients."""


def one_rank(device: str = "cpu") -> Layout:
    return Layout(MeshConfig(), world_size=1, rank=0, device_type=device)


def whole_shards(weights: Sequence[torch.nn.Parameter]) -> list[ParameterShard]:
    """Each weight as one rank's shard that holds all of it, and as one logical matrix."""
    shards = []
    for index, weight in enumerate(weights):
        shape = tuple(weight.shape)
        placement = Placement(name=f"layer{index}.weight", global_shape=shape)
        shards.append(
            ParameterShard(
                layout=placement.on(one_rank()),
                parameter=weight,
                kind="dense",
                matrices=(Matrix(offset=(0,) * len(shape), shape=shape),),
                placement=placement,
            )
        )
    return shards


def new_weights(device: str = "cpu", *, seed: int = 0) -> list[torch.nn.Parameter]:
    """Both layers of the student, one tall and one wide, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HIDDEN, INPUTS), (OUTPUTS, HIDDEN))
    weights = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
    return [torch.nn.Parameter(weight.to(device)) for weight in weights]


def updates(
    make: Make, num_steps: int, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What step number `num_steps` adds to each weight, and the weights after it.

    The gradients are the same whatever the optimizer does, new at every step: momentum and Nesterov
    show only where they differ.
    """
    weights = new_weights(device)
    step = make(weights)
    before: list[torch.Tensor] = []
    for index in range(num_steps):
        for weight, gradient in zip(weights, new_weights(device, seed=100 + index), strict=True):
            weight.grad = gradient.detach()
        before = [weight.detach().clone() for weight in weights]
        step()
    after = [weight.detach() for weight in weights]
    return [a - b for a, b in zip(after, before, strict=True)], after


def losses(make: Make, num_steps: int, device: str = "cpu") -> list[float]:
    """The training curve of a two-layer student of a fixed teacher; new inputs at every step."""
    weights = new_weights(device)
    teacher = [2.0 * weight.detach() for weight in new_weights(device, seed=1)]
    step = make(weights)
    generator = torch.Generator().manual_seed(2)
    curve = []
    for _ in range(num_steps):
        inputs = torch.randn(_BATCH, INPUTS, generator=generator).to(device)
        loss = (_network(weights, inputs) - _network(teacher, inputs)).square().mean()
        loss.backward()
        step()
        for weight in weights:
            weight.grad = None
        curve.append(float(loss.detach()))
    return curve


def relative_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest ||a - b|| / ||b|| of the pairs."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def _network(weights: Sequence[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return torch.tanh(inputs @ weights[0].mT) @ weights[1].mT
