"""What the tests of the model on several ranks do on each rank; results are plain tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from parallel_model import (
    CPU,
    LENGTH,
    MLA,
    Job,
    batches_of,
    close_groups,
    packed_row,
    start_job,
)

from megacomposer.data.batch import Batch
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.context_parallel import local_positions
from megacomposer.mesh.layout import Layout
from megacomposer.model.config import ModelConfig

if TYPE_CHECKING:
    from megacomposer.runtime.process import Process


def examine(
    process: Process, config: ModelConfig, mesh: MeshConfig, *, routing: bool = False
) -> dict[str, Any]:
    """What one model on one layout is asked, optionally about router biases too.

    Only the last question changes parameters.
    """
    with start_job(process, config, mesh) as job:
        uneven_loads(job)
        outcome = {**gradients(job), "leaks": leaks(job), "groups": groups_of(job.layout)}
        if routing:
            outcome |= {"balance": balance(job), "starved": starve(job)}
        return outcome | {"loss of zero weights": zero_between_evaluations(job)}


def uneven_loads(job: Job) -> None:
    """As if a step had gone before: at even loads, the auxiliary loss has no gradient."""
    for router in job.model.routers():
        if router.expert_load is not None:
            loads = torch.arange(1.0, len(router.expert_load) + 1)
            router.expert_load.copy_(loads / loads.sum())


def gradients(job: Job) -> dict[str, Any]:
    """One step's report, every gradient whole (from rank 0), and what was seen on the way."""
    from megacomposer.train.evaluate import evaluate

    layer = job.model.decoder.layers[-1]
    dtypes: dict[str, Any] = {"master": {shard.local.dtype for shard in job.shards}}
    handles = [
        layer.register_forward_hook(
            lambda module, hidden, output: dtypes.update(output=output[0].dtype)
        )
    ]
    if job.model.model_config.num_experts:
        # Experts refuse rows of another dtype than their weights'.
        handles.append(
            layer.mlp.experts.register_forward_hook(
                lambda module, rows, output: dtypes.update(experts=rows[0].dtype)
            )
        )
    held_out = evaluate(job.model, job.layout, batches_of(job.layout), device=CPU)
    forwards = []
    handles.append(layer.input_layernorm.register_forward_hook(lambda *call: forwards.append(1)))
    result = job.step()
    for handle in handles:
        handle.remove()
    return {
        "result": dataclasses.asdict(result),
        "held_out": held_out,
        "gradients": dict(job.optimizer.gradients) if job.layout.rank == 0 else {},
        "dtypes": dtypes,
        "layer forwards": len(forwards),
    }


def of_megatron_core(process: Process) -> dict[str, Any]:
    """`gradients` of megatron-core's own MoE layer; and why it does not take expert parallelism."""
    config = dataclasses.replace(MLA, moe_backend="megatron")
    with start_job(process, config, MeshConfig(tp=2)) as job:
        outcome = gradients(job)
    try:
        with start_job(process, config, MeshConfig(ep=2)):
            return outcome
    except ValueError as error:
        close_groups()
        return outcome | {"error": str(error)}


def zero_between_evaluations(job: Job) -> float:
    """Held-out loss after every weight was set to zero, straight after another evaluation."""
    from megacomposer.train.evaluate import evaluate

    evaluate(job.model, job.layout, batches_of(job.layout), device=CPU)
    for shard in job.shards:
        shard.local.zero_()
    return evaluate(job.model, job.layout, batches_of(job.layout), device=CPU)


def groups_of(layout: Layout) -> dict[str, list[int]]:
    """Ranks of the groups and mesh dims that this rank is in."""
    ranks = torch.distributed.get_process_group_ranks
    found = {
        "tp": ranks(layout.tp_group),
        "cp": ranks(layout.cp_group),
        "dp_cp": ranks(layout.dp_cp_group),
        "ep": ranks(layout.ep_group),
    }
    for mesh in (layout.dense_fsdp_mesh, layout.expert_fsdp_mesh):
        for dim, name in enumerate(mesh.mesh_dim_names):
            found[name] = ranks(mesh.get_group(dim))
    return found


@torch.no_grad()
def leaks(job: Job) -> dict[str, Any]:
    """Losses of each token and head before and after DP rank 0 changes its second document."""
    from megacomposer.model.inputs import prepare_inputs

    layout, depths = job.layout, len(job.model.mtp)

    def losses(batch: Batch) -> torch.Tensor:
        return job.model(prepare_inputs(batch, layout, mtp_num_layers=depths, device=CPU))

    batch = batches_of(layout)[0]
    lengths = batch.cu_seqlens.diff().tolist()
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = batch.token_ids.clone()
    if layout.dp_rank == 0:
        size = job.model.model_config.vocab_size
        tokens[document == 1] = (tokens[document == 1] + 7) % size
    before, after = losses(batch), losses(packed_row(tokens, lengths))
    local = local_positions(len(tokens), layout.cp_rank, layout.cp)
    changed = (document[local] == 1) & (layout.dp_rank == 0)
    twins = packed_row(tokens[:LENGTH].repeat(2), [LENGTH, LENGTH])
    return {"before": before, "after": after, "changed": changed, "twins": losses(twins)}


def balance(job: Job) -> dict[str, Any]:
    """Tokens that this rank routed to each expert of each layer, and the biases they lead to."""
    from megacomposer.model.inputs import prepare_inputs

    layers, depths = job.model.moe_layers(), len(job.model.mtp)
    for layer in layers.values():
        layer.router.expert_bias.zero_()

    def run() -> None:
        for batch in batches_of(job.layout):
            job.model(prepare_inputs(batch, job.layout, mtp_num_layers=depths, device=CPU))

    def counts() -> dict[str, torch.Tensor]:
        return {name: layer.tokens_per_expert.clone() for name, layer in layers.items()}

    def biases() -> dict[str, torch.Tensor]:
        return {name: layer.router.expert_bias.clone() for name, layer in layers.items()}

    run()
    outcome: dict[str, Any] = {"counts": counts()}
    metrics = job.train_step.balance.finish_step(apply=True)
    outcome |= {"metrics": {name: float(value) for name, value in metrics.items()}}
    outcome |= {"biases": biases(), "counts after": [counts()]}
    run()
    job.train_step.balance.finish_step(apply=False)
    outcome["counts after"].append(counts())
    return outcome | {"biases after a skipped step": biases()}


def starve(job: Job) -> dict[str, Any]:
    """A step in which every token goes to experts 0 and 1."""
    for layer in job.model.moe_layers().values():
        layer.router.expert_bias[0], layer.router.expert_bias[1] = 200.0, 100.0
    result = job.step()
    experts = [shard.name for shard in job.shards if shard.kind == "expert"]
    return {
        "result": dataclasses.asdict(result),
        "ep_rank": job.layout.ep_rank,
        "gradients": {name: job.optimizer.local[name] for name in experts},
    }


def replay(process: Process, config: ModelConfig, mesh: MeshConfig) -> dict[str, Any]:
    """One micro-batch with the routers' own choice, then with recorded ids in several ways."""
    with start_job(process, config, mesh) as job:
        uneven_loads(job)
        own = _run_with_ids(job, None)
        layers, depths = own["ids"].shape[0], len(job.model.mtp)
        outcome = {"own": own, "again": _run_with_ids(job, own["ids"])}
        outcome["decoder only"] = _run_with_ids(job, own["ids"][: layers - depths].int())
        generator = torch.Generator().manual_seed(3)
        weights = [shard.local for shard in job.shards if "router" in shard.name]
        kept = [weight.clone() for weight in weights]
        for weight in weights:
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.3 * weight.std() * noise if weight.numel() else 0.0
        outcome["perturbed"] = _run_with_ids(job, None)
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)
        unknown = outcome["perturbed"]["ids"].clone()
        unknown[:, ::4] = -1
        outcome["filtered"] = _run_with_ids(job, unknown)
        outcome["errors"] = []
        for wrong in (own["ids"].repeat(3, 1, 1), own["ids"][:, :, :1], own["ids"][:, 1:]):
            try:
                _run_with_ids(job, wrong)
            except ValueError as error:
                outcome["errors"].append(str(error))
        return outcome


def _run_with_ids(job: Job, ids_MNK: torch.Tensor | None) -> dict[str, Any]:
    """Losses, gradients, balance metrics and the ids that were used, for the whole row."""
    from megacomposer.model.inputs import prepare_inputs

    layout, batch = job.layout, batches_of(job.layout)[0]
    inputs = prepare_inputs(
        batch, layout, mtp_num_layers=len(job.model.mtp), device=CPU, expert_ids_MNK=ids_MNK
    )
    used: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda module, args, output: used.append(output[1]))
        for router in job.model.routers()
    ]
    job.train_step.balance.start_step(num_tokens=len(batch.token_ids) * layout.dp)
    losses = job.model(inputs)
    for handle in handles:
        handle.remove()
    losses.where(inputs.loss_mask_DT, 0.0).sum().backward()
    gradients = {shard.name: shard.local_grad.clone() for shard in job.shards}
    job.optimizer.zero_grad()
    metrics = job.train_step.balance.finish_step(apply=False)
    ids_MTK = _gather(torch.stack(used), layout.tp_group, dim=1)
    ids_MNK = torch.empty_like(_gather(ids_MTK, layout.cp_group, dim=1))
    for rank, part in enumerate(_parts(ids_MTK, layout.cp_group)):
        ids_MNK[:, local_positions(ids_MNK.shape[1], rank, layout.cp)] = part
    return {
        "losses": losses.detach(),
        "gradients": gradients,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "ids": ids_MNK,
    }


def _parts(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _gather(tensor: torch.Tensor, group: Any, *, dim: int) -> torch.Tensor:
    return torch.cat(_parts(tensor, group), dim=dim)


def break_steps(
    process: Process, mesh: MeshConfig, faults: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    """A good step, one for each (fault, rank) whose gradient is not finite, and a good one."""
    with start_job(process, MLA, mesh, adamw=True) as job:
        steps = [job.step(seed=0)]
        before = job.state()
        for kind, bad_rank in faults:
            handle = _install(job, kind) if process.rank == bad_rank else None
            steps.append(job.step(seed=1))
            if handle is not None:
                handle.remove()
        after = job.state()
        steps.append(job.step(seed=1))
        later = job.state()
        return {
            "skipped": [step.skipped for step in steps],
            "norms": [step.grad_norm for step in steps],
            "changed": [name for name in before if not torch.equal(before[name], after[name])],
            "moved later": [name for name in before if not torch.equal(after[name], later[name])],
            "names": set(before),
        }


def _install(job: Job, kind: str) -> Any:
    """A hook that breaks the loss, or one element of an expert gradient after its reduction."""
    if kind == "loss":
        return job.model.output_layer.register_forward_hook(
            lambda module, hidden, output: (output[0] * float("nan"), output[1])
        )
    shard = next(shard for shard in job.shards if shard.kind == "expert")
    return shard.parameter.register_post_accumulate_grad_hook(_spoil)


def _spoil(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.to_local()[0, 0, 0] = float("inf")
