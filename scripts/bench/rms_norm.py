"""Benchmark rms_norm, forward and forward+backward, against torch and (if installed) Liger."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, benchmark, relative_error, report
from megacomposer.kernels.rms_norm import rms_norm, rms_norm_reference, rms_norm_torch

EPS = 1e-6
SHAPES = ((32768, 2048), (32768, 7168), (8192, 16384))
Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def implementations(device: torch.device) -> dict[str, Norm]:
    """Ours and every peer that can run here."""
    found: dict[str, Norm] = {"ours": rms_norm, "torch": rms_norm_torch}
    if device.type == "cuda":
        found["torch.compile"] = torch.compile(rms_norm_reference, dynamic=False)
        if importlib.util.find_spec("liger_kernel") is not None:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            # zero offset, fp32 statistics, and not in place, which would overwrite the gradient
            options = (0.0, "llama", False)
            found["liger"] = lambda x, w, eps: LigerRMSNormFunction.apply(x, w, eps, *options)
    return found


def measure(shape: tuple[int, int], device: torch.device, graph: bool) -> list[Row]:
    """Rows of every implementation at one shape, bf16, forward then forward+backward."""
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[1], device=device)).bfloat16()
    sample = slice(0, 1024)
    expected = rms_norm_reference(x[sample].double(), weight.double(), EPS)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    tensor_bytes = x.numel() * x.element_size()
    rows = []
    # forward reads x and writes y; backward reads x and dy and writes dx
    for op, moved in (("rms_norm fwd", 2), ("rms_norm fwd+bwd", 5)):
        for name, norm in implementations(device).items():

            def step(norm: Norm = norm, op: str = op) -> None:
                y = norm(*leaves, EPS)
                if op.endswith("bwd"):
                    torch.autograd.grad(y, leaves, grad)

            rows.append(
                Row(
                    op=op,
                    implementation=name,
                    shape=shape,
                    dtype="bfloat16",
                    timing=benchmark(step, device=device, cuda_graph=graph),
                    bytes_moved=moved * tensor_bytes,
                    error=relative_error(norm(*leaves, EPS)[sample].detach(), expected),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="time CUDA graph replays")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    shapes = SHAPES if device.type == "cuda" else ((256, 2048),)
    rows = [row for shape in shapes for row in measure(shape, device, args.cuda_graph)]
    report(rows, device=device, json_path=args.json)


if __name__ == "__main__":
    main()
