"""Parameter shards cut from plain tensors, for tests of the optimizer."""

from __future__ import annotations

from typing import Literal

import torch

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.mesh.sharding import row_layout, scatter_from_global
from megacomposer.model.parameters import Matrix, ParameterShard


def shard_of(
    name: str,
    full: torch.Tensor,
    storage_rows: tuple[int, int] | None = None,
    *,
    row_pieces: list[tuple[int, int]] | None = None,
    column_piece: tuple[int, int] | None = None,
    is_primary: bool = True,
    kind: Literal["dense", "expert"] = "dense",
    matrices: tuple[Matrix, ...] = (),
    weight_decay: bool = True,
) -> ParameterShard:
    """The part of `full` that `row_layout` describes; by default all of it."""
    row_pieces = row_pieces or [(0, full.shape[0])]
    layout = row_layout(
        name,
        tuple(full.shape),
        row_pieces,
        column_piece,
        storage_rows or (0, sum(length for _, length in row_pieces)),
        is_primary=is_primary,
    )
    local = torch.full(layout.local_shape, float("nan"))
    scatter_from_global(layout, full, local)
    return ParameterShard(
        layout=layout,
        parameter=torch.nn.Parameter(local),
        kind=kind,
        matrices=matrices,
        weight_decay=weight_decay,
    )


def placed_shard(
    placement: Placement,
    full: torch.Tensor,
    layout: Layout,
    matrices: tuple[Matrix, ...] = (),
    *,
    weight_decay: bool = True,
    device: str = "cpu",
) -> ParameterShard:
    """The part of `full` that the rank of `layout`, which need not be started, stores."""
    stored = placement.on(layout)
    local = torch.full(stored.local_shape, float("nan"), device=device)
    scatter_from_global(stored, full, local)
    return ParameterShard(
        layout=stored,
        parameter=torch.nn.Parameter(local),
        kind=placement.kind,
        matrices=matrices,
        weight_decay=weight_decay,
        placement=placement,
    )


def set_gradient(shard: ParameterShard, full_gradient: torch.Tensor) -> None:
    """Gives the shard its part of a global gradient."""
    gradient = torch.full(shard.layout.local_shape, float("nan"))
    scatter_from_global(shard.layout, full_gradient, gradient)
    shard.parameter.grad = gradient


def row_matrices(shape: tuple[int, ...], rows_per_matrix: int) -> tuple[Matrix, ...]:
    """Heads of a [rows, columns] weight, or halves of every expert of a stack of them."""
    *leading, rows, columns = shape
    starts = range(0, rows, rows_per_matrix)
    if not leading:
        return tuple(Matrix(offset=(s, 0), shape=(rows_per_matrix, columns)) for s in starts)
    return tuple(
        Matrix(offset=(expert, s, 0), shape=(1, rows_per_matrix, columns))
        for expert in range(leading[0])
        for s in starts
    )


def column_matrices(shape: tuple[int, int], columns_per_matrix: int) -> tuple[Matrix, ...]:
    """Heads of an output projection, which tile the columns."""
    return tuple(
        Matrix(offset=(0, start), shape=(shape[0], columns_per_matrix))
        for start in range(0, shape[1], columns_per_matrix)
    )
