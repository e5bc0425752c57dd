"""QK-clip, the second half of MuonClip (Kimi K2, arXiv 2507.20534, algorithm 1).

After an optimizer step, a head whose largest attention logit S exceeded the threshold tau has its
query and key weights scaled so that the same inputs would give tau: with gamma = tau / S,

- MLA: query and key rows without position by sqrt(gamma) each, the head's rotary query rows by
  gamma. The rotary key is shared by all heads and stays, and so do the value rows.
- GQA: query and key rows by sqrt(gamma) each. Query heads of a group share one key, so the group
  takes the smallest gamma of its heads: our choice.

Shape letters: L attention layers (MTP depths included), N query heads of the whole model, R local
rows of all weights together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import TensorLayout
from megacomposer.model.attention import CoreAttention
from megacomposer.model.config import ModelConfig
from megacomposer.model.gpt import GPT
from megacomposer.model.parameters import ParameterShard

# A factor's entry is (layer * N + head) * 3 + one of these: gamma^0, gamma^(1/2), gamma^1.
_KEEP, _ROOT, _WHOLE = 0, 1, 2


class QKClip:
    """Watches the largest logit of every head during training forwards, and clips after a step.

    Storage rows are scaled in place, so it fits any optimizer; moments are left alone, as in the
    paper. The same maxima give the same bits on every layout.

    Raises:
        ValueError: the threshold is not positive, or the model normalises its queries and keys.
    """

    def __init__(
        self, model: GPT, layout: Layout, shards: Sequence[ParameterShard], *, threshold: float
    ) -> None:
        config = model.model_config
        if not threshold > 0:
            raise ValueError(f"qk_clip_threshold={threshold} must be positive to clip")
        if config.attention == "gqa" and config.qk_norm:
            raise ValueError(
                "qk_clip_threshold is set but model.qk_norm normalises queries and keys, which"
                " cancels the clip; set optim.qk_clip_threshold to 0"
            )
        self._config = config
        device = shards[0].local.device
        # A tensor, since a Python number over a tensor is a product with its reciprocal, and a head
        # below the threshold would be scaled by a little less than 1.
        self._threshold = torch.full((), threshold, device=device)
        cores = {
            name.removesuffix(".core_attention"): module
            for name, module in model.named_modules()
            if isinstance(module, CoreAttention)
        }
        self._maxima_LN = self._watch(list(cores.values()), layout, device)
        self._shards, entries = self._find_rows(list(cores), shards)
        self._rows = [len(entry) for entry in entries]
        nothing = torch.empty(0, dtype=torch.int64)
        self._entries_R = torch.cat([nothing, *entries]).to(device)

    def _watch(
        self, cores: list[CoreAttention], layout: Layout, device: torch.device
    ) -> torch.Tensor:
        """Give every layer its heads' part of one tensor [L, N] to keep maxima in."""
        heads = self._config.num_attention_heads
        maxima_LN = torch.full((len(cores), heads), float("-inf"), device=device)
        per_rank = heads // layout.tp
        own_LN = maxima_LN.narrow(1, layout.tp_rank * per_rank, per_rank)
        for core, own_N in zip(cores, own_LN, strict=True):
            core.max_logits = own_N
        return maxima_LN

    def _find_rows(
        self, attentions: list[str], shards: Sequence[ParameterShard]
    ) -> tuple[list[ParameterShard], list[torch.Tensor]]:
        """The weights of the named attention modules that this rank has rows of, and for each row
        the entry of its factor."""
        chosen, entries = [], []
        for shard in shards:
            attention, _, leaf = shard.name.removesuffix(".weight").rpartition(".")
            global_entries = row_entries(leaf, self._config)
            if attention not in attentions or global_entries is None or not shard.local.numel():
                continue
            first = attentions.index(attention) * self._config.num_attention_heads * 3
            chosen.append(shard)
            entries.append(first + local_entries(shard.layout, global_entries))
        return chosen, entries

    @torch.no_grad()
    def finish_step(self, *, apply: bool) -> dict[str, torch.Tensor]:
        """Reduce the maxima, clip (unless the step was skipped), and forget the maxima.

        One all-reduce over the world for all layers; nothing waits for the device.

        Returns:
            Metrics as 0-d tensors: the largest logit of the step's forwards, and how many heads
            were scaled, both over all layers.
        """
        maxima_LN = self.reduce_maxima()
        gammas_LN = self.gammas(maxima_LN)
        metrics = {
            "optim/max_attention_logit": maxima_LN.max(),
            "optim/qk_clipped_heads": (gammas_LN < 1).sum() * int(apply),
        }
        if apply:
            self.rescale(gammas_LN)
        self._maxima_LN.fill_(float("-inf"))
        return metrics

    def reduce_maxima(self) -> torch.Tensor:
        """The largest logits since the last step, float32 [L, N], over all ranks. Collective. The
        tensor stays this object's: later forwards write to it."""
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(self._maxima_LN, op=torch.distributed.ReduceOp.MAX)
        return self._maxima_LN

    def gammas(self, maxima_LN: torch.Tensor) -> torch.Tensor:
        """min(1, tau / S), float32 [L, N]; of a group of query heads, the smallest."""
        gammas_LN = self._threshold / torch.maximum(maxima_LN, self._threshold)
        if self._config.attention == "mla":
            return gammas_LN
        groups = self._config.query_groups
        per_group = self._config.num_attention_heads // groups
        return gammas_LN.unflatten(1, (groups, -1)).amin(2).repeat_interleave(per_group, dim=1)

    @torch.no_grad()
    def rescale(self, gammas_LN: torch.Tensor) -> None:
        """Multiply this rank's weight rows by their powers of gamma, float32 [L, N], in place."""
        powers = torch.stack([torch.ones_like(gammas_LN), gammas_LN.sqrt(), gammas_LN], dim=2)
        factors_R = powers.flatten()[self._entries_R]
        for shard, factor in zip(self._shards, factors_R.split(self._rows), strict=True):
            shard.local.mul_(factor[:, None])


def row_entries(leaf: str, config: ModelConfig) -> torch.Tensor | None:
    """head * 3 + power for every global row of a layer's weight `leaf`, int64; None for a weight
    that the clip leaves alone."""
    heads = config.num_attention_heads
    if leaf in ("linear_q_proj", "linear_q_up_proj"):
        powers = [_ROOT] * config.qk_nope_head_dim + [_WHOLE] * config.qk_rope_head_dim
    elif leaf == "linear_kv_up_proj":
        powers = [_ROOT] * config.qk_nope_head_dim + [_KEEP] * config.v_head_dim
    elif leaf == "linear_qkv":
        # Each group: its query heads, its key, its value. The heads of a group share one gamma.
        groups = config.query_groups
        per_group = heads // groups
        block_heads = torch.tensor([*range(per_group), 0, 0])
        block_powers = torch.tensor([_ROOT] * (per_group + 1) + [_KEEP])
        first_heads = torch.arange(groups)[:, None] * per_group
        blocks = (first_heads + block_heads) * 3 + block_powers
        return blocks.flatten().repeat_interleave(config.gqa_head_dim)
    else:
        return None
    return (torch.arange(heads)[:, None] * 3 + torch.tensor(powers)).flatten()


def local_entries(layout: TensorLayout, global_entries: torch.Tensor) -> torch.Tensor:
    """The entries of this rank's storage rows, int64 [local rows]."""
    assert len(global_entries) == layout.global_shape[0], layout
    entries = torch.zeros(layout.local_shape[0], dtype=torch.int64)
    for block in layout.blocks:
        entries[block.local_slices[0]] = global_entries[block.global_slices[0]]
    return entries
