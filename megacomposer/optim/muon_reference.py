"""Muon the readable way: gather each parameter whole, orthogonalise its matrices, keep your part.

What any faster Muon has to equal. Every rank does all the work, so it suits small models and tests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from megacomposer.kernels.newton_schulz import orthogonalize
from megacomposer.mesh.sharding import TensorLayout, gather_to_global, scatter_from_global
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim.adamw import AdamW
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.moments import local_gradients, moment_entry, new_moment
from megacomposer.optim.scale import update_scale

# 256 MiB of float32 per stack; Newton-Schulz needs a few times that
_CHUNK_ELEMENTS = 64 * 1024 * 1024


class MuonReference:
    """Muon for the parameters that have logical matrices, AdamW for all others.

    For each logical matrix (a head, an expert, a gate or up half), with gradient G:
        buf = mu * buf + G
        update = scale(m, n) * NewtonSchulz(G + mu * buf if nesterov else buf)
        parameter = parameter * (1 - lr * weight_decay) - lr * update

    `torch.optim.Muon` keeps the average mu * buf + (1 - mu) * G instead of the sum. That is
    (1 - mu) times ours, in the Nesterov form too, and Newton-Schulz ignores the factor: the updates
    agree to rounding. Momentum is float32 in the storage layout of the parameter, so a checkpoint
    reshards like the parameter does. The result does not depend on the sharding, bit for bit.

    `step` is collective over the world (one all-reduce per matrix parameter): every rank passes the
    same parameters in the same order, empty shards included.
    """

    def __init__(self, shards: Sequence[ParameterShard], config: OptimConfig) -> None:
        self._shards = list(shards)
        self._config = config
        self._matrix_shards = [shard for shard in self._shards if shard.matrices]
        for shard in self._matrix_shards:
            _check_matrices(shard)
        self._momenta = [new_moment(shard) for shard in self._matrix_shards]
        self._adamw = AdamW(
            [shard for shard in self._shards if not shard.matrices],
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        """Updates every parameter in place from its gradient; ValueError if one has none."""
        local_gradients(self._shards)  # all of them, before the first collective
        gradients = local_gradients(self._matrix_shards)
        for shard, gradient, momentum in zip(
            self._matrix_shards, gradients, self._momenta, strict=True
        ):
            self._step_matrices(shard, gradient, momentum, lr)
        self._adamw.step(lr=lr * self._config.muon_adam_lr_multiplier)

    def _step_matrices(
        self, shard: ParameterShard, gradient: torch.Tensor, momentum: torch.Tensor, lr: float
    ) -> None:
        mu = self._config.muon_momentum
        # Products and sums as separate operations here and below: whether a fused one rounds once
        # or twice may depend on where in a tensor an element lies, hence on the sharding.
        momentum.mul_(mu).add_(gradient)
        direction = momentum.mul(mu).add_(gradient) if self._config.muon_nesterov else momentum
        full = gather_to_global(shard.layout, direction)
        full.add_(0.0)  # the gather's sum turns -0.0 into 0.0, but one rank alone sums nothing
        self._orthogonalize_matrices(shard, full)
        update = torch.empty_like(momentum)
        scatter_from_global(shard.layout, full, update)
        local = shard.local
        if shard.weight_decay:
            local.mul_(1.0 - lr * self._config.weight_decay)
        local.sub_(update.mul_(lr))

    def _orthogonalize_matrices(self, shard: ParameterShard, full: torch.Tensor) -> None:
        """Replaces each logical matrix of `full` (global shape) by its scaled update, in place."""
        config = self._config
        for rows, columns, chunk in _same_shape_chunks(shard.matrices):
            stack = torch.stack([full[m.slices].reshape(rows, columns) for m in chunk])
            stack = orthogonalize(
                stack, steps=config.muon_ns_steps, coefficients=config.muon_ns_coefficients
            )
            stack.mul_(update_scale(config.muon_scale, rows, columns))
            for matrix, result in zip(chunk, stack.unbind(), strict=True):
                full[matrix.slices] = result.reshape(matrix.shape)

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for shard in self._shards:
            shard.parameter.grad = None

    def state_tensors(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """`optim/<name>/momentum` of each matrix parameter, and AdamW's moments of the others."""
        entries = dict(
            moment_entry(shard, "momentum", momentum)
            for shard, momentum in zip(self._matrix_shards, self._momenta, strict=True)
        )
        return entries | self._adamw.state_tensors()

    def state_scalars(self) -> dict[str, int | float]:
        """`step`: how many updates were made."""
        return self._adamw.state_scalars()

    def load_state_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restores what `state_scalars` returned; ValueError if it holds anything else."""
        self._adamw.load_state_scalars(scalars)


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
