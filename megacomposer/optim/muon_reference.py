"""Muon the readable way: gather each parameter whole, orthogonalise its matrices, keep your part.

What any faster Muon has to equal. Every rank does all the work, so it suits small models and tests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from megacomposer.kernels.newton_schulz import power_of_two_scale
from megacomposer.mesh.sharding import gather_to_global, scatter_from_global
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon_state import MuonState
from megacomposer.optim.orthogonal import (
    WIRE_DTYPES,
    decay_factor,
    orthogonalize_stacks,
    update_coefficient,
)

# 256 MiB of float32 per stack; Newton-Schulz needs a few times that
_CHUNK_ELEMENTS = 64 * 1024 * 1024


class MuonReference(MuonState):
    """Muon for the parameters that have logical matrices, AdamW for all others.

    For each logical matrix (a head, an expert, a gate or up half), with gradient G:
        buf = mu * buf + G
        update = scale(m, n) * NewtonSchulz(G + mu * buf if nesterov else buf)
        parameter = parameter * (1 - lr * weight_decay) - lr * update

    Newton-Schulz reads and returns `muon_wire_dtype`, with powers of two as in `orthogonal`. With
    `muon_cautious_decay` the decay applies only where update * parameter > 0.

    `torch.optim.Muon` keeps the average mu * buf + (1 - mu) * G instead of the sum. That is
    (1 - mu) times ours, in the Nesterov form too, and Newton-Schulz ignores the factor: the updates
    agree to rounding. The result does not depend on the sharding, bit for bit.

    `step` is collective over the world (one all-reduce per matrix parameter): every rank passes the
    same parameters in the same order, empty shards included.
    """

    def __init__(self, shards: Sequence[ParameterShard], config: OptimConfig) -> None:
        super().__init__(shards, config)
        for shard in self._matrix_shards:
            _check_matrices(shard)

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        """Updates every parameter in place from its gradient; ValueError if one has none."""
        for shard, gradient, momentum in zip(
            self._matrix_shards, self._matrix_gradients(), self._momenta, strict=True
        ):
            self._step_matrices(shard, gradient, momentum, lr)
        self._adamw.step(lr=lr * self._config.muon_adam_lr_multiplier)

    def _step_matrices(
        self, shard: ParameterShard, gradient: torch.Tensor, momentum: torch.Tensor, lr: float
    ) -> None:
        config, mu = self._config, self._config.muon_momentum
        # Products and sums as separate operations here and below: whether a fused one rounds once
        # or twice may depend on where in a tensor an element lies, hence on the sharding.
        momentum.mul_(mu).add_(gradient)
        direction = momentum.mul(mu).add_(gradient) if config.muon_nesterov else momentum
        # As integers: the gather's sum would turn -0.0 into 0.0, but one rank alone sums nothing.
        full = gather_to_global(shard.layout, direction.view(torch.int32)).view(torch.float32)
        coefficients = torch.empty_like(full)
        self._orthogonalize_matrices(shard, full, coefficients, lr)
        update, coefficient = torch.empty_like(momentum), torch.empty_like(momentum)
        scatter_from_global(shard.layout, full, update)
        scatter_from_global(shard.layout, coefficients, coefficient)
        local = shard.local
        decayed = local * decay_factor(config, lr, weight_decay=shard.weight_decay)
        if config.muon_cautious_decay:
            decayed = torch.where(update * local > 0, decayed, local)
        local.copy_(decayed.sub_(update.mul_(coefficient)))

    def _orthogonalize_matrices(
        self, shard: ParameterShard, full: torch.Tensor, coefficients: torch.Tensor, lr: float
    ) -> None:
        """Replaces each logical matrix of `full` (global shape) by its orthogonal u, in place, and
        writes what to multiply it by."""
        wire = WIRE_DTYPES[self._config.muon_wire_dtype]
        for rows, columns, chunk in _same_shape_chunks(shard.matrices):
            stack = torch.stack([full[m.slices].reshape(rows, columns) for m in chunk])
            scales = power_of_two_scale(stack.abs().amax(dim=(1, 2)))
            stack = (stack * scales[:, None, None]).to(wire)
            (stack,) = orthogonalize_stacks([stack], self._config)
            for matrix, result in zip(chunk, stack.unbind(), strict=True):
                full[matrix.slices] = result.reshape(matrix.shape).float()
                coefficients[matrix.slices] = update_coefficient(self._config, rows, columns, lr)

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}


def _check_matrices(shard: ParameterShard) -> None:
    shape = shard.layout.global_shape
    covered = 0
    for matrix in shard.matrices:
        assert len(matrix.shape) == len(shape) >= 2, (shard.name, matrix, shape)
        assert math.prod(matrix.shape[:-2]) == 1, (shard.name, matrix)
        covered += math.prod(matrix.shape)
    assert covered == math.prod(shape), (shard.name, covered, shape)


def _same_shape_chunks(matrices: tuple[Matrix, ...]) -> Iterator[tuple[int, int, list[Matrix]]]:
    """(rows, columns, matrices of that shape), a bounded number of elements at a time."""
    by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.rows, matrix.columns].append(matrix)
    for (rows, columns), same in by_shape.items():
        count = max(1, _CHUNK_ELEMENTS // (rows * columns))
        for start in range(0, len(same), count):
            yield rows, columns, same[start : start + count]
