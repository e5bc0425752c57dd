"""The override variable, and the rules that pick a torch built-in."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels import dispatch

X = torch.ones(2, 8)


def test_every_op_runs_torch_on_the_cpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.OVERRIDE_VARIABLE, raising=False)
    assert {dispatch.choose(op, X) for op in dispatch.TABLE} == {"torch"}


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_override_reaches_every_op(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(dispatch.OVERRIDE_VARIABLE, name)
    assert {dispatch.choose(op, X) for op in dispatch.TABLE} == {name}


@pytest.mark.parametrize("name", ["Triton", "cuda", "auto"])
def test_misspelt_override_is_refused_with_the_valid_names(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(dispatch.OVERRIDE_VARIABLE, name)
    with pytest.raises(ValueError, match="reference, torch, triton"):
        dispatch.choose("rms_norm", X)


def test_triton_override_is_refused_on_a_cpu_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(dispatch.OVERRIDE_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device cpu has no Triton"):
        dispatch.choose("rms_norm", X)


def test_triton_override_leaves_ops_without_a_kernel_on_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(dispatch.OVERRIDE_VARIABLE, "triton")
    assert dispatch.choose("masked_attention", X) == "torch"


def test_table_in_the_docstring_names_every_op() -> None:
    for op in dispatch.TABLE:
        assert op in dispatch.__doc__


def test_no_cuda_only_builtin_is_chosen_for_cpu_tensors() -> None:
    assert not dispatch.use_grouped_mm(X.bfloat16(), 8)
    assert not dispatch.use_flash_varlen(torch.ones(2, 1, 8, dtype=torch.bfloat16), 8)
