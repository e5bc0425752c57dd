"""Routing map of a mixture-of-experts layer: which row of the sorted buffer holds which token.

Shape suffixes: T tokens, K experts per token, E experts, R rows, T K where every pair has one.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from . import moe_routing_triton
from .dispatch import choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingMap:
    """The (token, choice) pairs sorted by expert, then token: all of them, or those with a row."""

    order: torch.Tensor
    """int64 [R]: row r holds the pair order[r] = t K + k; each pair once at most."""
    token_of_row: torch.Tensor
    """int64 [R]: the token t of row r, order // K."""
    row_of_TK: torch.Tensor
    """int64 [T, K]: the row of pair (t, k), the inverse of `order`; R or more for one without."""
    rows_per_expert: torch.Tensor
    """int64 [E]: rows of each expert, consecutive in expert order; sums to R."""
    ids_rise: bool = False
    """Whether each token's rows are known to rise with its choices, as far as it has any."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_of_TK.shape[0]

    @functools.cached_property
    def rising_rows_TK(self) -> torch.Tensor:
        """Each token's rows in their own order."""
        if self.ids_rise or self.row_of_TK.shape[1] == 1:
            return self.row_of_TK
        return self.row_of_TK.sort(dim=1).values

    def without_last_expert(self, num_rows: int) -> RoutingMap:
        """The map without the pairs of the last expert, which then have no row: that expert stands
        for none. num_rows: those of all the others, known to the host; nothing is read back."""
        return RoutingMap(
            order=self.order[:num_rows],
            token_of_row=self.token_of_row[:num_rows],
            row_of_TK=self.row_of_TK,
            rows_per_expert=self.rows_per_expert[:-1],
            ids_rise=self.ids_rise,
        )


def routing_map(
    expert_ids_TK: torch.Tensor, num_experts: int, *, ids_rise: bool = False
) -> RoutingMap:
    """The map of expert_ids [T, K] (any integer dtype, values in 0..num_experts-1).

    The same expert twice for a token is two rows. `ids_rise` says that each token's ids do, as a
    router gives them (ids of the last expert may stand anywhere if `without_last_expert` follows);
    who needs rows in order then need not sort them. T may be 0. Nothing is read back to the host on
    an accelerator, so an id out of range is a device-side assertion there, and a ValueError on the
    CPU. Raises ValueError too for a shape or dtype not as above, or num_experts < 1.
    """
    _check_ids(expert_ids_TK, num_experts)
    implementation = choose("routing_map", expert_ids_TK)
    is_triton = implementation == "triton" and expert_ids_TK.numel() > 0
    if not (is_triton and expert_ids_TK.is_cuda):  # else the kernel asserts it
        _check_range(expert_ids_TK, num_experts)
    if is_triton:
        order, token_of_row, row_of_TK, rows_per_expert = moe_routing_triton.map_tensors(
            expert_ids_TK, num_experts
        )
        return RoutingMap(
            order=order,
            token_of_row=token_of_row,
            row_of_TK=row_of_TK,
            rows_per_expert=rows_per_expert,
            ids_rise=ids_rise,
        )
    if implementation == "reference":
        map = routing_map_reference(expert_ids_TK, num_experts)
    else:
        map = routing_map_torch(expert_ids_TK, num_experts)
    return dataclasses.replace(map, ids_rise=ids_rise)


def routing_map_torch(expert_ids_TK: torch.Tensor, num_experts: int) -> RoutingMap:
    """`routing_map` by torch's stable sort, for ids known to be in range."""
    choices = expert_ids_TK.shape[1]
    # The stable sort of the flattened pairs leaves tokens in order inside each expert.
    sorted_ids, order = torch.sort(expert_ids_TK.reshape(-1).long(), stable=True)
    experts = torch.arange(num_experts, device=order.device)
    # Not bincount or histc: the one waits for the device, the other is refused by torch's
    # deterministic mode.
    ends_E = torch.searchsorted(sorted_ids, experts, right=True)
    row_of = torch.empty_like(order)
    row_of.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return RoutingMap(
        order=order,
        token_of_row=order.div(choices, rounding_mode="floor"),
        row_of_TK=row_of.view(-1, choices),
        rows_per_expert=ends_E.diff(prepend=ends_E.new_zeros(1)),
    )


def routing_map_reference(expert_ids_TK: torch.Tensor, num_experts: int) -> RoutingMap:
    """`routing_map` in plain Python."""
    choices = expert_ids_TK.shape[1]
    flat: list[int] = expert_ids_TK.reshape(-1).tolist()
    order = [p for e in range(num_experts) for p in range(len(flat)) if flat[p] == e]
    row_of = [0] * len(flat)
    for row, pair in enumerate(order):
        row_of[pair] = row
    counts = [flat.count(e) for e in range(num_experts)]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=expert_ids_TK.device)

    return RoutingMap(
        order=tensor(order),
        token_of_row=tensor([pair // choices for pair in order]),
        row_of_TK=tensor(row_of).view(-1, choices),
        rows_per_expert=tensor(counts),
    )


def _check_ids(expert_ids_TK: torch.Tensor, num_experts: int) -> None:
    dtype = expert_ids_TK.dtype
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not is_integer or expert_ids_TK.dim() != 2 or expert_ids_TK.shape[1] < 1 or num_experts < 1:
        raise ValueError(
            "routing_map: expert_ids must be an integer [T, K] with K >= 1 and num_experts >= 1, "
            f"got {dtype} {tuple(expert_ids_TK.shape)} and {num_experts}"
        )


def _check_range(expert_ids_TK: torch.Tensor, num_experts: int) -> None:
    if expert_ids_TK.numel() == 0:
        return
    lowest, highest = expert_ids_TK.long().aminmax()  # torch has no aminmax of uint16 to uint64
    if expert_ids_TK.device.type == "cpu":
        if lowest < 0 or highest >= num_experts:
            raise ValueError(
                f"routing_map: expert ids must be in 0..{num_experts - 1}, "
                f"got {int(lowest)}..{int(highest)}"
            )
    else:
        torch._assert_async((lowest >= 0) & (highest < num_experts))
