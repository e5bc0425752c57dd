"""Rotary angles and rotation against megatron-core's and against complex numbers."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as core_yarn
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megacomposer.model import presets
from megacomposer.model.config import YarnConfig
from megacomposer.model.rotary import (
    inverse_frequencies,
    rotary_angles,
    rotate_interleaved,
    yarn_mscale,
)

POSITIONS = 5000
YARN = {
    "deepseek_v3": (64, 10000.0, presets.deepseek_v3().yarn),
    "kimi_k2": (64, 50000.0, presets.kimi_k2().yarn),
    "unequal temperatures": (
        32,
        10000.0,
        YarnConfig(factor=8.0, original_max_positions=2048, mscale=0.7, mscale_all_dim=0.3),
    ),
    "short": (8, 10000.0, YarnConfig(factor=4.0, original_max_positions=16)),
}


@pytest.fixture
def _core_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's embeddings move themselves to `torch.cuda.current_device()`."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


@pytest.mark.usefixtures("_core_on_cpu")
@pytest.mark.parametrize(("dim", "theta"), [(64, 10000.0), (64, 1e6), (128, 100000.0), (2, 1e4)])
def test_plain_angles_differ_from_megatron_core(dim: int, theta: float) -> None:
    core = RotaryEmbedding(dim, 1.0, rotary_base=theta, use_cpu_initialization=True)
    ours = rotary_angles(torch.arange(POSITIONS), inverse_frequencies(dim, theta, None))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, core(POSITIONS), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_core_on_cpu")
@pytest.mark.parametrize("name", YARN)
def test_yarn_angles_differ_from_megatron_core(name: str) -> None:
    dim, theta, yarn = YARN[name]
    assert yarn is not None
    core = core_yarn.YarnRotaryEmbedding(
        dim,
        rotary_base=theta,
        use_cpu_initialization=True,
        scaling_factor=yarn.factor,
        original_max_position_embeddings=yarn.original_max_positions,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        mscale=yarn.mscale,
        mscale_all_dim=yarn.mscale_all_dim,
    )
    expected, temperature = core.get_emb(POSITIONS)
    frequencies = inverse_frequencies(dim, theta, yarn)
    # 1 - mask is rounded in megatron-core, so a frequency may differ in its last bits.
    torch.testing.assert_close(
        rotary_angles(torch.arange(POSITIONS), frequencies), expected, rtol=3e-6, atol=0
    )
    ours = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    assert ours == pytest.approx(temperature, rel=1e-12)
    plain = inverse_frequencies(dim, theta, None)
    assert not torch.allclose(frequencies, plain), "the scaling must do something"


def test_yarn_leaves_fast_pairs_alone_and_divides_slow_ones() -> None:
    dim, theta, yarn = YARN["deepseek_v3"]
    assert yarn is not None
    ratio = inverse_frequencies(dim, theta, yarn) / inverse_frequencies(dim, theta, None)
    assert ratio[0].item() == 1.0
    assert ratio[-1].item() == pytest.approx(1 / yarn.factor)
    assert bool((ratio.diff() < 1e-6).all())


def test_angle_depends_on_the_position_id_and_not_on_the_row() -> None:
    """Packed documents restart at 0: equal positions turn equally."""
    inverse = inverse_frequencies(16, 10000.0, None)
    angles = rotary_angles(torch.tensor([0, 1, 2, 0, 1, 7]), inverse)
    assert torch.equal(angles[:2], angles[3:5])
    assert torch.equal(angles[5], rotary_angles(torch.tensor([7]), inverse)[0])


def test_rotation_differs_from_complex_multiplication() -> None:
    generator = torch.Generator().manual_seed(0)
    mscale = 1.25
    x = torch.randn(9, 1, 3, 8, generator=generator, dtype=torch.float64)
    angles = rotary_angles(torch.arange(9) * 3, inverse_frequencies(8, 100.0, None)).double()
    turned = rotate_interleaved(x, angles, mscale)

    pairs = torch.view_as_complex(x.view(9, 1, 3, 4, 2))
    expected = pairs * torch.polar(torch.full((9, 1, 1, 4), mscale).double(), angles[..., :4])
    # First members of all pairs, then the second ones.
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_rotation_differs_from_megatron_cores_latent_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 1, 3, 16, generator=generator)
    angles = rotary_angles(torch.arange(9), inverse_frequencies(16, 10000.0, None))
    expected = _apply_rotary_pos_emb_bshd(x, angles, multi_latent_attention=True, mscale=1.1)
    torch.testing.assert_close(rotate_interleaved(x, angles, 1.1), expected)


def test_score_depends_on_more_than_the_distance() -> None:
    generator = torch.Generator().manual_seed(2)
    inverse = inverse_frequencies(8, 100.0, None)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        angles = rotary_angles(torch.tensor([query_position, key_position]), inverse).double()
        turned = rotate_interleaved(torch.stack((query, key))[:, None, None], angles, 1.0)
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(33, 30), rel=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-2)


def test_rotation_changes_the_dtype_of_its_input() -> None:
    x = torch.ones(2, 1, 1, 4, dtype=torch.bfloat16)
    angles = rotary_angles(torch.arange(2), inverse_frequencies(4, 10000.0, None))
    assert rotate_interleaved(x, angles, 1.0).dtype == torch.bfloat16


@pytest.mark.parametrize(("factor", "coefficient"), [(1.0, 1.0), (0.5, 1.0), (40.0, 0.7)])
def test_temperature_differs_from_megatron_core(factor: float, coefficient: float) -> None:
    expected = core_yarn._yarn_get_mscale(factor, coefficient)
    assert yarn_mscale(factor, coefficient) == pytest.approx(expected, rel=1e-12)
