"""What moe_mlp.py measures: operands, float64 results, work counts, and peak memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from moe_mlp_peers import Call
from moe_rows_cases import routed_ids

from megacomposer.kernels.bench import Row, Timing, relative_error
from megacomposer.kernels.grouped_mlp import grouped_swiglu_reference
from megacomposer.kernels.moe_routing import routing_map

# Tokens, hidden, intermediate, experts, choices. The second is what one of 8 ranks of Kimi K2 has.
SHAPES = {
    "qwen3": (32768, 2048, 768, 128, 8),
    "kimi": (8192, 7168, 2048, 48, 8),
    "tiny": (64, 64, 48, 16, 4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """Most bytes allocated at once during a call, beyond those before it."""

    implementation: str
    case: str
    forward_bytes: int
    both_bytes: int
    """Of forward and backward, gradients included."""
    gradient_bytes: int
    """What of them the caller keeps."""

    def record(self) -> dict[str, object]:
        """A line of the JSON file."""
        return {"op": "peak memory"} | dataclasses.asdict(self)

    def __str__(self) -> str:
        beyond = (self.both_bytes - self.gradient_bytes) / 2**30
        return (
            f"peak | {self.implementation} | {self.case} | fwd {self.forward_bytes / 2**30:.2f} GiB"
            f" | fwd+bwd {self.both_bytes / 2**30:.2f} GiB, beyond gradients {beyond:.2f} GiB"
        )


class Case:
    """Operands of one shape and routing: bf16, probabilities fp32, summing to 1 for each token."""

    def __init__(self, shape: str, routing: str, device: torch.device) -> None:
        tokens, hidden, inner, experts, choices = SHAPES[shape]
        self.name, self.device, self.experts = f"{shape} {routing}", device, experts
        self.routing, self.sizes = routing, (tokens * choices, hidden, inner, experts)
        torch.manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            x = torch.empty(size, device=device, dtype=torch.bfloat16).normal_(std=scale)
            return x.requires_grad_()

        # Rising for each token, as a router of ours gives them.
        self.ids_TK = routed_ids(routing, tokens, choices, experts, device).sort(dim=1).values
        self.x_TH = normal(tokens, hidden)
        self.gate_up_E2IH = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.down_EHI = normal(experts, hidden, inner, scale=inner**-0.5)
        self.probs_TK = torch.rand(tokens, choices, device=device).softmax(1).requires_grad_()
        self.grad_TH = normal(tokens, hidden).detach()
        self.leaves = (self.x_TH, self.gate_up_E2IH, self.down_EHI, self.probs_TK)
        self._exact: list[torch.Tensor] | None = None

    def forward(self, call: Call) -> Callable[[], torch.Tensor]:
        """The call as in training: with a graph."""
        return lambda: call(*self.leaves, self.ids_TK)

    def forward_backward(self, call: Call) -> Callable[[], object]:
        """The call and the gradients of all leaves."""

        def run() -> object:
            return torch.autograd.grad(call(*self.leaves, self.ids_TK), self.leaves, self.grad_TH)

        return run

    def errors(self, call: Call) -> tuple[float, float]:
        """Relative errors of the result, and the largest of the gradients'."""
        if self._exact is None:
            map = routing_map(self.ids_TK, self.experts)
            wide = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
            y = grouped_swiglu_reference(*wide[:3], map, wide[3])
            grads = torch.autograd.grad(y, wide, self.grad_TH.double())
            # In fp32, which is enough to compare with and takes half of the memory.
            self._exact = [t.detach().float() for t in (y, *grads)]
        y = call(*self.leaves, self.ids_TK)
        grads = torch.autograd.grad(y, self.leaves, self.grad_TH)
        first, *rest = map_errors((y, *grads), self._exact)
        return first, max(rest)

    def peak(self, name: str, forward: Callable[[], object], both: Callable[[], object]) -> Peak:
        """Zeros on the CPU, which counts nothing."""
        gradients = sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)
        sizes = [_peak_bytes(run, self.device) for run in (forward, both)]
        return Peak(
            implementation=name, case=self.name, forward_bytes=sizes[0], both_bytes=sizes[1],
            gradient_bytes=gradients,
        )  # fmt: skip

    def row(self, op: str, name: str, timing: Timing, error: float) -> Row:
        """A line of the report; a backward has twice the products of a forward."""
        rows, hidden, inner, _ = self.sizes
        return Row(
            op=f"{op} {self.routing}",
            implementation=name,
            shape=self.sizes,
            dtype="bfloat16",
            timing=timing,
            flops=(18 if "bwd" in op else 6) * rows * hidden * inner,
            error=error,
        )


def map_errors(actual: tuple[torch.Tensor, ...], exact: list[torch.Tensor]) -> list[float]:
    """The relative error of each, one at a time."""
    return [relative_error(a, e) for a, e in zip(actual, exact, strict=True)]


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = run()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before
