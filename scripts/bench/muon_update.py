"""Benchmark Muon's elementwise passes over experts and heads, against torch's foreach operators."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from megacomposer.kernels import muon_update as ours
from megacomposer.kernels.bench import Row, benchmark, report

# (tensors, rows, columns, heads side by side): experts, up-projections, output projections
CUDA_SHARE = ((48, 2048, 7168, 1), (512, 192, 1536, 1), (2, 7168, 8192, 64))
CPU_SHARE = ((4, 64, 224, 1), (16, 12, 48, 1), (2, 64, 256, 8))
Pass = tuple[str, int, Callable[[], object], Callable[[], object]]


def pieces_of(share: tuple[tuple[int, int, int, int], ...]) -> list[ours.Piece]:
    """Every head of every tensor, one after the other on the wire."""
    pieces: list[ours.Piece] = []
    wire = tensor = 0
    for count, rows, stride, heads in share:
        columns = stride // heads
        for index in range(count * heads):
            size = {"rows": rows, "columns": columns, "stride": stride, "wire_offset": wire}
            place = {"tensor": tensor + index // heads, "offset": index % heads * columns}
            pieces.append(ours.Piece(**size, **place, matrix=len(pieces)))
            wire += rows * columns
        tensor += count
    return pieces


def passes(table: ours.PieceTable, device: torch.device) -> list[Pass]:
    """Name, bytes an element that the pass must move, our pass, and torch's."""
    sizes, n, half = [*table.elements.values()], table.num_matrices, table.wire_extent // 2
    g, m, p = ([torch.randn(size, device=device) for size in sizes] for _ in range(3))
    wire, back = (torch.zeros(sum(sizes), dtype=torch.float16, device=device) for _ in range(2))
    halves = [
        ours.Rectangle(source_offset=i * half, source_stride=128, target_offset=i * 128,
                       target_stride=256, rows=half // 128, columns=128) for i in (0, 1)
    ]  # fmt: skip
    rectangles = ours.RectangleTable(halves, device)
    options, scales = {"mu": 0.95, "nesterov": True}, torch.ones(n, device=device)
    numbers = {"coefficients": [0.01] * n, "decays": [0.999] * n, "cautious": False}

    def direction() -> tuple[torch.Tensor, ...]:
        return torch._foreach_add(g, m, alpha=0.95)

    return [
        ("momentum", 12, lambda: ours.update_momentum(g, m, table, num_matrices=n, **options),
            lambda: (torch._foreach_mul_(m, 0.95), torch._foreach_add_(m, g),
                torch._foreach_norm(direction(), float("inf")))),
        ("pack", 10, lambda: ours.pack(g, m, table, scales=scales, out=wire, **options),
            lambda: torch._foreach_copy_(wire.split(sizes), torch._foreach_mul(direction(), 4.0))),
        ("copy", 4, lambda: ours.copy_rectangles(wire, back, rectangles), lambda: back.copy_(wire)),
        ("update", 10, lambda: ours.apply_update(p, table, wire, **numbers),
            lambda: (torch._foreach_mul_(p, 0.999),
                torch._foreach_add_(p, [v.float() for v in wire.split(sizes)], alpha=-0.01))),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    device = torch.device((args := parser.parse_args()).device)
    table = ours.PieceTable(pieces_of(CUDA_SHARE if device.type == "cuda" else CPU_SHARE), device)
    rows = [
        Row(op=f"muon {op}", implementation=name, shape=(table.wire_extent,), dtype="float32",
            timing=benchmark(step, device=device), bytes_moved=moved * table.wire_extent)
        for op, moved, *steps in passes(table, device)
        for name, step in zip(("ours", "torch"), steps, strict=True)
    ]  # fmt: skip
    report(rows, device=device, json_path=args.json)


if __name__ == "__main__":
    main()
