"""Benchmark the router's choice and gates, with and without replay, beside megatron-core's.

megatron-core's ends in dense [T, E] masks; getting ids from them is not counted against it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, benchmark, report
from megacomposer.kernels.moe_router import RouterRule, route

SIGMOID = RouterRule(num_chosen=8, score="sigmoid")
CASES = {
    128: RouterRule(num_chosen=8, score="softmax"),
    256: dataclasses.replace(SIGMOID, num_groups=8, topk_groups=4),
    384: SIGMOID,
}
"""Qwen3-30B-A3B, DeepSeek-V3, Kimi K2."""


def calls(logits_TE: torch.Tensor, rule: RouterRule) -> dict[str, Callable[[], torch.Tensor]]:
    """Gates by implementation."""
    bias = None
    if rule.score == "sigmoid":
        bias = torch.linspace(-0.1, 0.1, logits_TE.shape[1], device=logits_TE.device)
    near = route(logits_TE + 0.3 * torch.randn_like(logits_TE), rule, bias).ids_TK
    found = {
        "ours": lambda: route(logits_TE, rule, bias).gates_TK,
        "ours, replay": lambda: route(logits_TE, rule, bias, near).gates_TK,
    }
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    found["mcore"] = lambda: topk_routing_with_score_function(
        logits_TE,
        rule.num_chosen,
        num_groups=rule.num_groups or None,
        group_topk=rule.topk_groups or None,
        score_function=rule.score,
        expert_bias=bias,
    )[0]
    return found


def measure(experts: int, tokens: int, device: torch.device, graph: bool) -> list[Row]:
    """Forward, and without a graph forward + backward, of every implementation."""
    rule, rows = CASES[experts], []
    logits = (2 * torch.randn(tokens, experts, device=device)).requires_grad_()
    # Logits once, ids and gates once.
    moved = 4 * tokens * experts + 12 * tokens * rule.num_chosen
    for name, call in calls(logits, rule).items():
        upstream = torch.randn_like(call())
        timings = {"router fwd": benchmark(call, device=device, cuda_graph=graph)}
        if not graph:
            both = functools.partial(differentiate, call, logits, upstream)
            timings["router fwd+bwd"] = benchmark(both, device=device)
        rows += [
            Row(op=op, implementation=name, shape=(tokens, experts), dtype="float32",
                timing=timing, bytes_moved=moved)
            for op, timing in timings.items()
        ]  # fmt: skip
    return rows


def differentiate(call: Callable[[], torch.Tensor], logits: torch.Tensor, g: torch.Tensor) -> None:
    torch.autograd.grad(call(), logits, g)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="default: 32768, on the CPU 256")
    parser.add_argument("--cuda-graph", action="store_true", help="time CUDA graph replays")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens = args.tokens or (32768 if device.type == "cuda" else 256)
    rows = [row for experts in CASES for row in measure(experts, tokens, device, args.cuda_graph)]
    report(rows, device=device, json_path=args.json)


if __name__ == "__main__":
    main()
