"""GPT: megatron-core's GPTModel with rotary angles by position, our MTP, and per-token losses."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from megacomposer.mesh.layout import Layout
from megacomposer.model.config import ModelConfig
from megacomposer.model.inputs import ModelInputs
from megacomposer.model.megatron_moe import MegatronMoELayer
from megacomposer.model.moe import MoELayer
from megacomposer.model.mtp import MTPLayer
from megacomposer.model.rotary import inverse_frequencies, rotary_angles
from megacomposer.model.router import Router
from megacomposer.model.spec import block_spec, build_backend, layer_spec, transformer_config


class GPT(GPTModel):
    """A decoder with optional MTP depths; `forward` returns cross-entropy per token and depth."""

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        backend = build_backend(config)
        super().__init__(
            config=transformer_config(config, layout),
            transformer_layer_spec=block_spec(config, backend),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=1,
            share_embeddings_and_output_weights=config.tie_embeddings,
            position_embedding_type="none",
        )
        self.model_config = config
        mtp_layer = layer_spec(config, backend, moe=config.is_moe_layer(config.num_layers - 1))
        self.mtp = torch.nn.ModuleList(
            MTPLayer(self.config, mtp_layer, backend.layer_norm(), depth)
            for depth in range(1, config.mtp_num_layers + 1)
        )
        for index, router in enumerate(self.routers()):
            router.moe_index = index
        # Not a buffer: it is derived from the configuration and must stay float32.
        self.inv_freq = inverse_frequencies(config.rotary_dim, config.rope_theta, config.yarn).to(
            torch.cuda.current_device()
        )
        shard = config.padded_vocab_size // layout.tp
        first_id = layout.tp_rank * shard
        self.local_vocab_size = min(max(config.vocab_size - first_id, 0), shard)

    def forward(  # type: ignore[override]
        self, inputs: ModelInputs, *, num_heads: int | None = None, return_logits: bool = False
    ) -> torch.Tensor:
        """Cross-entropy in nats, float32 [D, T]: depth 0 is the main head, k the k-th MTP depth.

        Masked positions hold a value too; the loss function applies the mask.

        Routers replay `inputs.segments.expert_ids_MTK` if given (`kernels.moe_router.route`).

        Args:
            num_heads: run only the first so many heads; None runs all.
            return_logits: return the main head's logits [T, 1, vocabulary / tp] instead.

        Raises:
            ValueError: expert ids for another number of layers, tokens or experts per token, or for
                megatron-core's routers.
        """
        self._check_replay(inputs)
        hidden = self._hidden_states(inputs, num_heads or 1 + len(self.mtp))
        if return_logits:
            return self._logits(hidden[0])
        losses = [
            self.compute_language_model_loss(labels[None], self._logits(state))[0]
            for state, labels in zip(hidden, inputs.labels_DT, strict=True)
        ]
        return torch.stack(losses)

    def _hidden_states(self, inputs: ModelInputs, num_heads: int) -> list[torch.Tensor]:
        """Final hidden states [T / tp, 1, H] of the trunk and of the first MTP depths."""
        angles = rotary_angles(inputs.position_ids_T, self.inv_freq)
        common = {"attention_mask": inputs.segments, "rotary_pos_emb": angles}
        state = self.decoder(hidden_states=self._embed(inputs, 0), **common)
        states = [state]
        for depth, layer in enumerate(self.mtp[: num_heads - 1], start=1):
            state = layer(state, self._embed(inputs, depth), **common)
            states.append(state)
        return states

    def _embed(self, inputs: ModelInputs, depth: int) -> torch.Tensor:
        return self.embedding(input_ids=inputs.token_ids_DT[depth][None], position_ids=None)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tied = self.model_config.tie_embeddings
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits, _ = self.output_layer(hidden, weight=weight)
        if self.local_vocab_size < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= self.local_vocab_size
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def _check_replay(self, inputs: ModelInputs) -> None:
        ids_MTK = inputs.segments.expert_ids_MTK
        if ids_MTK is None:
            return
        if self.model_config.moe_backend != "megacomposer":
            raise ValueError("router replay needs model.moe_backend 'megacomposer'")
        layers, depths = len(self.routers()), len(self.mtp)
        tokens, choices = len(inputs.position_ids_T), self.model_config.experts_per_token
        shapes = [(count, tokens, choices) for count in (layers - depths, layers)]
        if not layers or tuple(ids_MTK.shape) not in shapes:
            raise ValueError(
                f"expert ids {tuple(ids_MTK.shape)} do not fit a model of {layers} MoE layers"
                f" ({depths} of them MTP), {tokens} tokens on this rank and {choices} experts each"
            )

    def moe_layers(self) -> dict[str, MoELayer | MegatronMoELayer]:
        """Every MoE layer by its module name."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, (MoELayer, MegatronMoELayer))
        }

    def routers(self) -> list[Router]:
        """Our router of every MoE layer, in the order of `moe_layers`; none of megatron-core's."""
        routers = (layer.router for layer in self.moe_layers().values())
        return [router for router in routers if isinstance(router, Router)]
