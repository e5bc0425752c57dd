"""The CUDA C++ grouped products of an expert MLP, on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megacomposer.kernels import grouped_products_sm90 as products
from megacomposer.kernels import sm90
from megacomposer.kernels.bench import relative_error

DEVICE = torch.device("cuda")
# Rows on both sides of a tile's 128 and a pair's 256, experts without any, first and last too.
COUNTS = [[700, 1, 0, 130, 257], [0, 0, 900, 0], [1], [0] * 40 + [7] * 64, [128, 256, 127, 129]]
SIZES = [(256, 384), (72, 40), (8, 8), (136, 264)]
ROUNDING = 2**-8  # the most by which bfloat16 changes a value; float32 sums add less


@pytest.fixture(autouse=True)
def _memory_full_of_nan() -> None:
    """Leaves NaN in the blocks that torch hands out next."""
    if not sm90.is_available(DEVICE):
        pytest.skip("needs a Hopper GPU and the library of csrc/*_sm90.cu (nvcc at installation)")
    blocks = [torch.full((2**exponent,), float("nan"), device=DEVICE) for exponent in range(8, 24)]
    torch.cuda.synchronize()
    del blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mlp:
    x: torch.Tensor
    grad: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    counts: list[int]
    source: torch.Tensor | None
    prob: torch.Tensor | None

    def run(self) -> list[torch.Tensor]:
        """hidden, activation, y, d hidden, the activation again, d prob (or empty), dx"""
        counts = torch.tensor(self.counts, device=DEVICE)
        how = {"source": self.source, "prob": self.prob}
        hidden, activation = products.gate_up_product(self.x, self.gate_up, counts, **how)
        y = products.down_product(activation, self.down, counts)
        arguments = (self.grad, self.down, hidden, counts)
        dhidden, again, dprob = products.down_backward(*arguments, **how)
        over = hidden.clone()  # as the layer calls it: d hidden in place of hidden
        arguments = (self.grad, self.down, over, counts)
        written, *_ = products.down_backward(*arguments, **how, dhidden=over)
        assert written is over
        # Bits: rows of another expert may be NaN.
        assert torch.equal(written.view(torch.int16), dhidden.view(torch.int16))
        dx = products.dx_product(dhidden, self.gate_up, counts)
        dprob = hidden.new_empty(0) if dprob is None else dprob
        return [hidden, activation, y, dhidden, again, dprob, dx]

    def exact(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each result in float64 from the operands that the kernel had."""
        hidden, activation, _, dhidden, *_ = (t.double() for t in results)
        rows = slice(None) if self.source is None else self.source
        x, grad = self.x.double()[rows], self.grad.double()[rows]
        prob = torch.ones_like(x[:, 0]) if self.prob is None else self.prob.double()
        gate, up = hidden.chunk(2, dim=1)
        fresh_gate, fresh_up = self._each(x, self.gate_up.mT).chunk(2, dim=1)
        d = self._each(grad, self.down)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        scaled = d * prob[:, None]
        dgate = scaled * up * (sigmoid + silu * (1 - sigmoid))
        return [
            torch.cat([fresh_gate, fresh_up], dim=1),
            F.silu(fresh_gate) * fresh_up * prob[:, None],
            self._each(activation, self.down.mT),
            torch.cat([dgate, scaled * silu], dim=1),
            silu * up * prob[:, None],
            (d * silu * up).sum(dim=1)[: 0 if self.prob is None else None],
            self._each(dhidden, self.gate_up),
        ]

    def _each(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(self.counts), weight.double().unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])


def _mlp(
    counts: list[int], hidden: int, intermediate: int, *, gathered: bool = True, tokens: int = 333
) -> _Mlp:
    generator = torch.Generator(DEVICE).manual_seed(sum(counts) + hidden)
    rows, experts = sum(counts), len(counts)
    tokens = tokens if gathered else rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    return _Mlp(
        x=normal(tokens, hidden).bfloat16(),
        grad=normal(tokens, hidden).bfloat16(),
        gate_up=(normal(experts, 2 * intermediate, hidden) / hidden**0.5).bfloat16(),
        down=(normal(experts, hidden, intermediate) / intermediate**0.5).bfloat16(),
        counts=counts,
        source=torch.randint(tokens, (rows,), device=DEVICE) if gathered else None,
        prob=normal(rows).sigmoid() if gathered else None,
    )


def _check(mlp: _Mlp) -> None:
    results = mlp.run()
    for i, (ours, exact) in enumerate(zip(results, mlp.exact(results), strict=True)):
        assert ours.shape == exact.shape
        assert exact.numel() == 0 or relative_error(ours, exact) < ROUNDING, i


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts[:5]))
def test_error_is_more_than_rounding(
    counts: list[int],
    size: tuple[int, int],
    gathered: bool,
    cluster: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_blocks_a_cluster", lambda rows, experts: cluster)
    _check(_mlp(counts, *size, gathered=gathered))


@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 256), slice(192, 264)], ids=str)
def test_columns_by_themselves_differ_from_those_of_all(columns: slice) -> None:
    mlp = _mlp(COUNTS[0], 264, 136)
    counts = torch.tensor(mlp.counts, device=DEVICE)
    _, activation, y, dhidden, _, _, dx = mlp.run()
    some_y = products.down_product(activation, mlp.down[:, columns], counts)
    some_dx = products.dx_product(dhidden, mlp.gate_up[:, :, columns], counts)
    assert torch.equal(some_y, y[:, columns])
    assert torch.equal(some_dx, dx[:, columns])


def test_stride_of_the_only_expert_is_used() -> None:
    mlp = _mlp([300], 72, 40)
    strange = dataclasses.replace(mlp, down=mlp.down[0, :, :, None].permute(2, 0, 1))
    assert strange.down.is_contiguous()
    assert strange.down.stride(0) == 1
    for a, b in zip(strange.run(), mlp.run(), strict=True):
        assert torch.equal(a, b)


def test_no_rows_at_all() -> None:
    assert [t.shape[0] for t in _mlp([0, 0], 64, 64).run()[:5]] == [0] * 5


def test_rows_of_other_experts_or_their_nan_reach_a_row() -> None:
    """The rows that follow an expert's are loaded with its last tile."""
    mlp = _mlp([200, 100, 300], 136, 264)
    source = torch.arange(600, device=DEVICE) % 300
    source[200:300] += 300
    x = torch.cat([mlp.x, mlp.x])[:600].clone()
    clean = dataclasses.replace(mlp, x=x, grad=x.flip(0), source=source)
    poisoned = x.clone()
    poisoned[300:] = float("nan")
    dirty = dataclasses.replace(clean, x=poisoned)
    kept = torch.ones(600, dtype=torch.bool, device=DEVICE)
    kept[200:300] = False
    for a, b in zip(clean.run(), dirty.run(), strict=True):
        assert torch.equal(a[kept], b[kept])
        assert not torch.isfinite(b[200:300]).any()


def test_bits_of_a_row_depend_on_the_other_rows_or_the_run() -> None:
    """One expert's rows alone, at other places in their tiles, and as one block or two."""
    mlp = _mlp([300, 513, 40, 1900], 264, 392)
    results = mlp.run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(mlp.run(), results, strict=True))
    assert mlp.source is not None
    assert mlp.prob is not None
    rows = slice(300 + 77, 300 + 513)
    alone = dataclasses.replace(
        mlp,
        gate_up=mlp.gate_up[1:2],
        down=mlp.down[1:2],
        counts=[513 - 77],
        source=mlp.source[rows],
        prob=mlp.prob[rows],
    )
    assert all(torch.equal(a, b[rows]) for a, b in zip(alone.run(), results, strict=True))


def test_gathered_and_contiguous_rows_differ() -> None:
    mlp = _mlp([300, 0, 129], 264, 392)
    rows = dataclasses.replace(mlp, x=mlp.x[mlp.source], grad=mlp.grad[mlp.source], source=None)
    assert all(torch.equal(a, b) for a, b in zip(mlp.run(), rows.run(), strict=True))


def test_rows_that_lie_apart_are_read_from_the_wrong_place() -> None:
    for gathered in (True, False):
        mlp = _mlp([70, 300], 136, 64, gathered=gathered)
        wide = torch.full((mlp.x.shape[0], 200), float("nan"), device=DEVICE).bfloat16()
        wide[:, 24:160] = mlp.x
        apart = dataclasses.replace(mlp, x=wide[:, 24:160])
        assert all(torch.equal(a, b) for a, b in zip(mlp.run(), apart.run(), strict=True))


def test_more_than_2_31_elements_wrap_offsets() -> None:
    """170 experts of 4096 x 3200 weights, and 700,000 rows of 4096 columns of hidden."""
    counts = [0] * 169 + [1000]
    _check(_mlp(counts, 3200, 2048))
    mlp = _mlp([699_000, 1000], 64, 2048)
    hidden, activation, y, *rest = mlp.run()
    assert hidden.numel() > 2**31
    assert mlp.source is not None
    assert mlp.prob is not None
    last = dataclasses.replace(
        mlp,
        gate_up=mlp.gate_up[1:],
        down=mlp.down[1:],
        counts=[1000],
        source=mlp.source[-1000:],
        prob=mlp.prob[-1000:],
    )
    for a, b in zip(last.run(), [hidden, activation, y, *rest], strict=True):
        assert torch.equal(a, b[-1000:])


def test_counts_beyond_the_rows_write_past_the_end() -> None:
    mlp = _mlp([100, 60], 64, 64, gathered=False)
    guard = torch.full((400, 64), 7.0, device=DEVICE).bfloat16()
    out = guard[:160]
    products._launch(
        products._DOWN,
        mlp.x,
        mlp.down,
        torch.tensor([100, 250], device=DEVICE),
        n=64,
        k=64,
        out=out,
    )
    assert (guard[160:] == 7.0).all()
    assert relative_error(out, mlp._each(mlp.x.double(), mlp.down.mT)) < ROUNDING


def test_captured_launches_replay_with_other_counts() -> None:
    mlp = _mlp([300, 129], 64, 64, gathered=False)
    counts = torch.tensor([429, 0], device=DEVICE)
    products.down_product(mlp.x, mlp.down, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products.down_product(mlp.x, mlp.down, counts)
    counts.copy_(torch.tensor(mlp.counts, device=DEVICE))
    graph.replay()
    assert torch.equal(out, products.down_product(mlp.x, mlp.down, counts))
    assert relative_error(out, mlp._each(mlp.x.double(), mlp.down.mT)) < ROUNDING


def test_what_the_kernel_cannot_take_is_taken() -> None:
    mlp = _mlp([10, 20], 64, 64)
    x, gate_up, down = mlp.x, mlp.gate_up, mlp.down
    assert products.takes(x, gate_up, down, 2)
    assert not products.takes(x, gate_up, down, 1025)
    assert products.takes(x[:, :0].new_zeros(5, 128)[:, :64], gate_up, down, 2)
    for refused in (
        (x.half(), gate_up.half(), down.half()),
        (x.cpu(), gate_up.cpu(), down.cpu()),
        (x[:, :60].contiguous(), gate_up[..., :60].contiguous(), down[:, :60].contiguous()),
        (x, gate_up.mT.contiguous().mT, down),
        (x.new_zeros(5, 65)[:, 1:], gate_up, down),
        (x[:1, :1].expand_as(x), gate_up, down),
    ):
        assert not products.takes(*refused, 2)
