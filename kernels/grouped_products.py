"""Matrix products of rows sorted by expert: those that the expert MLP is made of.

Rows may come in parts, each sorted by expert: then there are G = parts x E groups of consecutive
rows, and group g belongs to expert g % E. A range of rows lies in one part.
Shape suffixes: R rows, C rows of a range of them, E experts, G groups, M by N a weight.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Products(Protocol):
    """The two products that forward and backward are made of."""

    def rows(self, x_CN: torch.Tensor, weight_EMN: torch.Tensor, start: int = 0) -> torch.Tensor:
        """y[r] = weight[expert of row start + r] x[r]: [C, N] -> [C, M]."""
        ...

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        """The sum over each expert's rows of grad[r] x[r]^T: [E, M, N]; zeros without rows."""
        ...


class ExpertLoop:
    """One matrix product per expert; row counts are read back to the host.

    Raises ValueError where they do not sum to `rows`.
    """

    def __init__(self, rows_per_group: torch.Tensor, rows: int, experts: int) -> None:
        self.counts: list[int] = rows_per_group.tolist()
        self.experts = experts
        if sum(self.counts) != rows:
            raise ValueError(
                f"grouped_swiglu: rows_per_expert sums to {sum(self.counts)} "
                f"but the map has {rows} rows"
            )

    def rows(self, x_CN: torch.Tensor, weight_EMN: torch.Tensor, start: int = 0) -> torch.Tensor:
        weights = weight_EMN.unbind(0) * (len(self.counts) // self.experts)
        parts = zip(x_CN.split(self._within(start, len(x_CN))), weights, strict=True)
        return torch.cat([x @ weight.T for x, weight in parts])

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        grads, xs = grad_RM.split(self.counts), x_RN.split(self.counts)
        # A product over no rows is zeros, so empty experts need no case of their own.
        return torch.stack(
            [
                torch.cat(grads[e :: self.experts]).T @ torch.cat(xs[e :: self.experts])
                for e in range(self.experts)
            ]
        )

    def _within(self, start: int, rows: int) -> list[int]:
        """How many of the rows start..start + rows each group has."""
        counts, first = [], 0
        for count in self.counts:
            last = first + count
            counts.append(max(0, min(last, start + rows) - max(first, start)))
            first = last
        return counts


class GroupedMm:
    """`torch._grouped_mm`, which wants int32 row ends, 16-byte aligned operands with real strides,
    and leaves rows past the last end unwritten (hence the assertion that there are none)."""

    def __init__(self, rows_per_group: torch.Tensor, rows: int, experts: int) -> None:
        self.experts = experts
        self.empty_G = rows_per_group == 0
        self.ends_G = rows_per_group.cumsum(0)
        torch._assert_async(self.ends_G[-1] == rows)

    def rows(self, x_CN: torch.Tensor, weight_EMN: torch.Tensor, start: int = 0) -> torch.Tensor:
        if x_CN.shape[0] == 0:
            return x_CN.new_empty((0, weight_EMN.shape[1]))
        counts_E = counts_within(self.ends_G, start, start + x_CN.shape[0], self.experts)
        weight_ENM = _dense_either_way(weight_EMN).transpose(1, 2)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(_dense_either_way(x_CN), weight_ENM, offs=ends_E)

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        if x_RN.shape[0] == 0:
            return x_RN.new_zeros((self.experts, grad_RM.shape[1], x_RN.shape[1]))
        out = torch._grouped_mm(
            _dense_either_way(grad_RM).T, _dense_either_way(x_RN), offs=self.ends_G.int()
        )
        if not _zeroes_empty_groups(x_RN.device):
            out.masked_fill_(self.empty_G[:, None, None], 0.0)
        if out.shape[0] == self.experts:
            return out
        # One result for each part: the only place where a sum over rows is rounded on the way.
        parts = out.view(-1, self.experts, *out.shape[1:])
        return parts.sum(0, dtype=torch.float32).to(out.dtype)


def counts_within(ends_G: torch.Tensor, start: int, stop: int, experts: int) -> torch.Tensor:
    """How many of the rows start..stop - 1, all of one part, each expert has: int64 [E]."""
    ends_G = (ends_G - start).clamp_(0, stop - start)
    return ends_G.diff(prepend=ends_G.new_zeros(1)).view(-1, experts).sum(0)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, copied where it is strided or does not start at 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _dense_either_way(x: torch.Tensor) -> torch.Tensor:
    """x, copied as by `dense`; a transposed weight is dense as it is."""
    is_transposed = x.transpose(-2, -1).is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_transposed else dense(x)


def _zeroes_empty_groups(device: torch.device) -> bool:
    """Whether `torch._grouped_mm` writes zeros for the weights of an expert without rows. It does
    on Hopper and on the CPU; on Blackwell it does not (pytorch issue 172439)."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9
