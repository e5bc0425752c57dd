"""What surrounds the CUDA C++ kernels for Hopper and needs no GPU."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megacomposer.kernels import (
    batched_products_sm90,
    grouped_products_sm90,
    grouped_weights_sm90,
    newton_schulz_small,
    sm90,
)
from megacomposer.kernels.batched_products import Product, row_major

_CSRC = Path(__file__).parents[2] / "csrc"
_STRUCTURES = [
    ("batched_products_sm90.cu", "ProductArguments", batched_products_sm90._Arguments),
    ("grouped_products_sm90.cu", "GroupedArguments", grouped_products_sm90._Arguments),
    ("grouped_weights_sm90.cu", "WeightArguments", grouped_weights_sm90._Arguments),
    ("small_newton_schulz_sm90.cu", "SmallArguments", newton_schulz_small._Arguments),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("file", "name", "structure"), _STRUCTURES)
def test_structure_is_laid_out_otherwise_in_cpp(
    file: str, name: str, structure: type[ctypes.Structure], tmp_path: Path
) -> None:
    text = (_CSRC / file).read_text()
    (definition,) = re.findall(rf"^struct {name} \{{.*?^\}};", text, re.DOTALL | re.MULTILINE)
    chain = (_CSRC / "small_newton_schulz_chain.cuh").read_text()
    constants = re.findall(r"^constexpr int kMaxSteps = .*;", chain, re.MULTILINE)
    fields = [field[0] for field in structure._fields_]
    offsets = ", ".join(f"offsetof({name}, {field})" for field in fields)
    source = tmp_path / "layout.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <initializer_list>\n"
        + "\n".join([*constants, definition])
        + f"\nint main() {{ for (auto x : {{{offsets}, sizeof({name})}}) std::printf("
        '"%zu ", x); }\n'
    )
    program = tmp_path / "layout"
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(source)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    ours = [getattr(structure, field).offset for field in fields] + [ctypes.sizeof(structure)]
    assert [int(word) for word in printed.split()] == ours


def test_limits_differ_from_those_of_cpp() -> None:
    steps = f"constexpr int kMaxSteps = {newton_schulz_small.MAX_STEPS};"
    assert steps in (_CSRC / "small_newton_schulz_chain.cuh").read_text()
    text = (_CSRC / "small_newton_schulz_sm90.cu").read_text()
    assert f"run_small<{newton_schulz_small.MAX_ROWS}>" in text


def test_strides_given_to_cpp_do_not_lead_to_the_elements() -> None:
    """Reads every operand through its pointer and strides alone, as the kernel does."""
    memory = torch.arange(4 * 40 * 80).to(torch.int16).view(torch.float16)

    def strided(batch: int, rows: int, columns: int, *, along_rows: bool) -> torch.Tensor:
        x = memory.view(4, 40, 80)[:batch, 8:]
        return x[:, :rows, :columns] if along_rows else x.mT[:, :rows, :columns]

    def elements(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        offset = (pointer - memory.data_ptr()) // 2
        return torch.as_strided(memory, shape, strides, offset).view(torch.int16)

    for a_rows, b_rows in itertools.product([True, False], repeat=2):
        a = strided(3, 16, 24, along_rows=a_rows)
        b = strided(3, 24, 32, along_rows=not b_rows)
        c = strided(3, 16, 32, along_rows=True)
        product = row_major(Product(a=a, b=b, c=c, out=torch.empty_like(c), beta=0.5))
        x = batched_products_sm90._arguments(product)
        assert (x.a_rows, x.b_rows) == (a_rows, b_rows)
        assert (x.batch, x.m, x.n, x.k, x.scale) == (3, 16, 32, 24, None)
        assert (x.beta, x.alpha, x.is_symmetric, x.is_bfloat16) == (0.5, 1.0, 0, 0)
        inner = (x.a_stride, 1) if a_rows else (1, x.a_stride)
        assert torch.equal(elements(x.a, a.shape, (x.a_batch, *inner)), a.view(torch.int16))
        inner = (1, x.b_stride) if b_rows else (x.b_stride, 1)
        assert torch.equal(elements(x.b, b.shape, (x.b_batch, *inner)), b.view(torch.int16))
        found = elements(x.c, c.shape, (x.c_batch, x.c_stride, 1))
        assert torch.equal(found, c.view(torch.int16))


def test_batch_of_one_is_refused_for_its_meaningless_stride() -> None:
    x = torch.empty(5, 9, 9, dtype=torch.float16)[1:2, :8, :8]
    assert batched_products_sm90._batch_stride(x) * 2 % 16 == 0


@pytest.mark.parametrize("gather", ["left", "right", "none"])
def test_weight_gradient_is_not_what_its_arguments_say(gather: str) -> None:
    """Reads the operands of a product, and writes its result, through the arguments alone."""
    wide = torch.randn(9, 64).bfloat16()
    left = wide[:, 8:24] if gather == "left" else torch.randn(11, 48).bfloat16()[:, 24:40]
    right = wide[:, 8:48] if gather == "right" else torch.randn(11, 40).bfloat16()
    source = torch.randint(9, (11,))
    sources = {side: source if gather == side else None for side in ("left", "right")}
    counts, out = torch.tensor([3, 1, 2, 5]), torch.zeros(2, 16, 40).bfloat16()
    x = grouped_weights_sm90._arguments(
        left, right, counts, out, sources["left"], sources["right"], 11
    )
    memory = {t.data_ptr(): t for t in (left, right, source, counts, out)}
    a = torch.as_strided(memory[x.a], (memory[x.a].shape[0], x.m), (x.a_stride, 1))
    b = torch.as_strided(memory[x.b], (x.rows, x.n), (x.b_stride, 1))
    if x.source is not None:
        a = a[memory[x.source]]
    result = memory[x.out].view(x.experts, x.n, x.m).mT if x.is_transposed else out
    assert result.shape == (x.experts, x.m, x.n)
    row = 0
    for group, count in enumerate(memory[x.rows_per_group].tolist()):
        rows = slice(row, row + count)
        result[group % x.experts] += (a[rows].T.double() @ b[rows].double()).bfloat16()
        row += count
    assert (row, x.groups) == (x.rows, 4)
    for expert in range(2):
        rows = torch.tensor([[0, 1, 2, 4, 5], [3, 6, 7, 8, 9, 10]][expert])
        one = left[source[rows] if gather == "left" else rows].double()
        other = right[source[rows] if gather == "right" else rows].double()
        torch.testing.assert_close(out[expert].double(), one.T @ other, rtol=0.02, atol=0.05)


def test_failure_is_silent_or_does_not_say_what_failed() -> None:
    sm90.check(0, "products")
    with pytest.raises(RuntimeError, match=r"products of 3: CUDA 700"):
        sm90.check(700, "products of 3")
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
        sm90.check(-1, "products")


def test_missing_library_is_silent_on_hopper_or_noisy_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # no Hopper GPU here: what torch says of one is replaced
    device = torch.device("cuda:0")
    monkeypatch.setattr(sm90, "_LIBRARY", tmp_path / "_sm90.so")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper GPU")
    is_available = sm90.is_available.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not is_available(device)
    assert caplog.text == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not is_available(device)
    assert "slower on a Hopper GPU; put nvcc on PATH" in caplog.text
    (tmp_path / "_sm90.so").touch()
    assert is_available(device)
