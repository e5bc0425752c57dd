"""Held-out loss and sampling, on the training ranks with the training weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megacomposer.data.batch import Batch
from megacomposer.data.tokenizer import Tokenizer
from megacomposer.loss.language_model import masked_sums
from megacomposer.mesh.layout import Layout
from megacomposer.model.gpt import GPT
from megacomposer.model.inputs import prepare_inputs
from megacomposer.model.parallelize import release_gathered_weights
from megacomposer.train.step import sum_over_data_ranks


@torch.no_grad()
def evaluate(
    model: GPT, layout: Layout, batches: Iterable[Batch], *, device: torch.device
) -> float:
    """Mean main-head loss over all batches of all DP ranks, in nats per token.

    Collective: every rank must bring the same number of batches.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        inputs = prepare_inputs(batch, layout, mtp_num_layers=0, device=device)
        totals[0] += masked_sums(model(inputs, num_heads=1), inputs.loss_mask_DT)[0]
        totals[1] += inputs.loss_mask_DT.sum()
    release_gathered_weights(model)
    model.train()
    loss_sum, count = sum_over_data_ranks(totals, layout).tolist()
    if count == 0:
        raise ValueError("the held-out data has no label to score; see data.heldout_prefix")
    return loss_sum / count


@torch.no_grad()
def complete(
    model: GPT,
    layout: Layout,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    seed: int,
    device: torch.device,
    temperature: float = 0.7,
) -> str:
    """Sample a continuation of `prompt`; stops at the end-of-document token.

    Recomputes the whole prefix for every token: a demonstration for small models, not an engine.
    Collective, with the same arguments on every rank; the ranks sample the same tokens.
    """
    assert layout.cp == 1, "RunConfig refuses a completion under context parallelism"
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = [int(i) for i in tokenizer.encode(prompt)]
    start = len(ids)
    # The row is padded to a multiple that TP divides.
    multiple = layout.tp
    while len(ids) < start + num_tokens:
        padded = -(-len(ids) // multiple) * multiple
        batch = _prefix_batch(ids, padded)
        inputs = prepare_inputs(batch, layout, mtp_num_layers=0, device=device)
        logits = model(inputs, num_heads=1, return_logits=True)[:, 0]
        logits = gather_from_tensor_model_parallel_region(logits)
        # The model may have rows for more ids than the tokenizer can decode.
        last = logits[len(ids) - 1, : tokenizer.vocab_size].float().cpu()
        probabilities = torch.softmax(last / temperature, dim=-1)
        chosen = int(torch.multinomial(probabilities, 1, generator=generator))
        if chosen == tokenizer.eod_id:
            break
        ids.append(chosen)
    release_gathered_weights(model)
    model.train()
    return tokenizer.decode(ids[start:])


def _prefix_batch(ids: list[int], length: int) -> Batch:
    token_ids = torch.zeros(length, dtype=torch.int64)
    token_ids[: len(ids)] = torch.tensor(ids)
    return Batch(
        token_ids=token_ids,
        labels=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.zeros(length, dtype=torch.bool),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
    )
