"""Cases and peers of moe_rows.py: routing map, permute and combine at one shape and routing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from megacomposer.kernels.bench import Row, Timing, relative_error
from megacomposer.kernels.moe_permute import combine, permute
from megacomposer.kernels.moe_routing import routing_map

Call = Callable[[], object]
ROUTINGS = ("uniform", "zipf", "one_hot", "empty_30")
_SAMPLE = slice(0, 1024)


def routed_ids(
    kind: str, tokens: int, choices: int, experts: int, device: torch.device
) -> torch.Tensor:
    """K distinct experts of each token, int64 [T, K], drawn by Gumbel top-k.

    zipf: expert e has weight (e + 1)^-1.2; one_hot: all tokens take the same K experts; empty_30:
    three experts of ten take no token.
    """
    if kind == "one_hot":
        return torch.arange(choices, device=device).repeat(tokens, 1)
    logits = torch.zeros(experts, device=device)
    if kind == "zipf":
        logits = -1.2 * torch.arange(1, experts + 1, device=device).log()
    elif kind == "empty_30":
        logits[: experts * 3 // 10] = -torch.inf
    noise = -torch.empty(tokens, experts, device=device).exponential_().log()
    return (logits + noise).topk(choices, dim=1).indices


class Case:
    """Operands of one shape and routing, bf16 rows and fp32 probabilities."""

    def __init__(
        self, kind: str, *, tokens: int, hidden: int, choices: int, experts: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.kind, self.tokens, self.hidden = kind, tokens, hidden
        self.choices, self.experts = choices, experts
        options = {"device": device, "dtype": torch.bfloat16}
        rows = tokens * choices
        self.ids_TK = routed_ids(kind, tokens, choices, experts, device)
        self.map = routing_map(self.ids_TK, experts)
        self.x_TH, self.grad_TH = (torch.randn(tokens, hidden, **options) for _ in range(2))
        self.rows_RH, self.grad_RH = (torch.randn(rows, hidden, **options) for _ in range(2))
        self.probs_TK = torch.rand(tokens, choices, device=device)
        for leaf in (self.x_TH, self.rows_RH, self.probs_TK):
            leaf.requires_grad_()

    def bytes_moved(self, op: str) -> int:
        """Least bytes read and written; offsets are int64, probabilities fp32."""
        tokens, rows = self.tokens, self.tokens * self.choices
        row_bytes = 2 * self.hidden
        return {
            "routing_map": 4 * 8 * rows + 8 * self.experts,
            "map+permute": row_bytes * (tokens + rows) + 4 * 8 * rows,
            "permute fwd": row_bytes * (tokens + rows) + 8 * rows,
            "permute bwd": row_bytes * (tokens + rows) + 8 * rows,
            "combine fwd": row_bytes * (tokens + rows) + 12 * rows,
            "combine bwd": row_bytes * (tokens + 2 * rows) + 16 * rows,
        }[op]

    def calls(self, op: str) -> dict[str, Call]:
        """Every implementation of `op` by name; a backward's graph is built here, once."""
        forwards = {"ours": _Ours(self), "torch": _Torch(self)}
        if importlib.util.find_spec("megatron.core") is not None:
            forwards["mcore"] = _Core(self)
        calls: dict[str, Call] = {}
        for name, peer in forwards.items():
            forward = getattr(peer, op.replace("+", "_").split()[0], None)
            if forward is None:
                continue
            calls[name] = self._backward(op, forward) if op.endswith("bwd") else forward
        calls["copy"] = self._copy(op)
        return calls

    def _backward(self, op: str, forward: Call) -> Call:
        leaves = (self.x_TH,) if op == "permute bwd" else (self.rows_RH, self.probs_TK)
        grad = self.grad_RH if op == "permute bwd" else self.grad_TH
        result = forward()
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    def _copy(self, op: str) -> Call:
        """A plain copy that reads and writes as many bytes together: the ceiling."""
        source = torch.randint(
            256, (self.bytes_moved(op) // 2,), dtype=torch.uint8, device=self.x_TH.device
        )
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def error(self, op: str, result: object) -> float | None:
        """Of the first rows of the first result, against float64."""
        rows, tokens = self.map.row_of_TK[_SAMPLE], self.map.token_of_row[_SAMPLE]
        probs_TK = self.probs_TK.detach().double()
        if op in ("permute fwd", "map+permute"):
            expected = self.x_TH[tokens]
        elif op == "permute bwd":
            expected = self.grad_RH[rows].double().sum(1)
        elif op == "combine fwd":
            expected = (self.rows_RH[rows].double() * probs_TK[_SAMPLE, :, None]).sum(1)
        elif op == "combine bwd":
            prob_R = probs_TK.flatten()[self.map.order[_SAMPLE]]
            expected = self.grad_TH[tokens].double() * prob_R[:, None]
        else:
            return None
        first = result if isinstance(result, torch.Tensor) else result[0]
        return relative_error(first[_SAMPLE], expected)

    def row(self, op: str, name: str, timing: Timing, error: float | None) -> Row:
        """The report's line. The copy gets an op of its own, as it is no peer."""
        width = self.experts if op == "routing_map" else self.hidden
        return Row(
            op=f"{op} {self.kind}" + (", bytes only" if name == "copy" else ""),
            implementation=name,
            shape=(self.tokens, self.choices, width),
            dtype="int64" if op == "routing_map" else "bfloat16",
            timing=timing,
            bytes_moved=self.bytes_moved(op),
            error=error,
        )


class _Ours:
    def __init__(self, case: Case) -> None:
        self.case = case

    def routing_map(self) -> object:
        return routing_map(self.case.ids_TK, self.case.experts)

    def permute(self) -> torch.Tensor:
        return permute(self.case.x_TH, self.case.map)

    def map_permute(self) -> torch.Tensor:
        return permute(self.case.x_TH, routing_map(self.case.ids_TK, self.case.experts))

    def combine(self) -> torch.Tensor:
        case = self.case
        return combine(case.rows_RH, case.map, case.tokens, case.probs_TK)


class _Torch:
    """What a layer written in torch does: sort, index_select, index_add_ (with atomics)."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def routing_map(self) -> tuple[torch.Tensor, ...]:
        ids = self.case.ids_TK.flatten()
        order = torch.sort(ids, stable=True).indices
        token_of_row = order // self.case.choices
        return token_of_row, order, torch.bincount(ids, minlength=self.case.experts)

    def permute(self) -> torch.Tensor:
        return self.case.x_TH.index_select(0, self.case.map.token_of_row)

    def map_permute(self) -> torch.Tensor:
        return self.case.x_TH.index_select(0, self.routing_map()[0])

    def combine(self) -> torch.Tensor:
        case = self.case
        prob_R = case.probs_TK.flatten()[case.map.order]
        weighted = (case.rows_RH * prob_R[:, None]).to(case.rows_RH.dtype)
        return torch.zeros_like(case.grad_TH).index_add_(0, case.map.token_of_row, weighted)


class _Core:
    """megatron-core's unfused permute, which sorts a dense mask, and its scatter-add."""

    def __init__(self, case: Case) -> None:
        from megatron.core.transformer.moe import moe_utils

        self.case, self.utils = case, moe_utils
        mask = torch.zeros(case.tokens, case.experts, dtype=torch.bool, device=case.x_TH.device)
        self.mask_TE = mask.scatter_(1, case.ids_TK, True)

    def map_permute(self) -> torch.Tensor:
        rows = self.case.map.order.numel()
        return self.utils.permute(self.case.x_TH, self.mask_TE, num_out_tokens=rows)[0]

    def combine(self) -> torch.Tensor:
        case = self.case
        probs_TE = torch.zeros_like(self.mask_TE, dtype=torch.float32)
        probs_TE = probs_TE.scatter(1, case.ids_TK, case.probs_TK)
        return self.utils.unpermute(
            case.rows_RH, case.map.token_of_row, case.x_TH.shape, probs_TE, self.mask_TE
        )
