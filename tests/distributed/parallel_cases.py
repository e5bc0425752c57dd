"""What the tests of the model on several ranks do on each rank; results are plain tensors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from parallel_model import CPU, LENGTH, MLA, batches_of, packed_row, start_job

from megacomposer.data.batch import Batch
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.context_parallel import local_positions
from megacomposer.mesh.layout import Layout
from megacomposer.model.config import ModelConfig

if TYPE_CHECKING:
    from megacomposer.runtime.process import Process


def gradients(process: Process, config: ModelConfig, mesh: MeshConfig) -> dict[str, Any]:
    """One step's report, every gradient whole (from rank 0), and what was seen on the way."""
    from megacomposer.train.evaluate import evaluate

    with start_job(process, config, mesh) as job:
        layer = job.model.decoder.layers[-1]
        dtypes: dict[str, Any] = {"master": {shard.local.dtype for shard in job.shards}}
        # Experts refuse rows of another dtype than their weights'.
        layer.mlp.experts.register_forward_hook(
            lambda module, rows, output: dtypes.update(experts=rows[0].dtype)
        )
        layer.register_forward_hook(
            lambda module, hidden, output: dtypes.update(output=output[0].dtype)
        )
        held_out = evaluate(job.model, job.layout, batches_of(job.layout), device=CPU)
        result = job.step()
        return {
            "result": dataclasses.asdict(result),
            "held_out": held_out,
            "gradients": job.optimizer.gradients if process.is_main else {},
            "dtypes": dtypes,
            "groups": groups_of(job.layout),
        }


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


def leaks(process: Process, config: ModelConfig, mesh: MeshConfig) -> dict[str, Any]:
    """Losses of each token and head before and after DP rank 0 changes its second document."""
    from megacomposer.model.inputs import prepare_inputs

    with start_job(process, config, mesh) as job, torch.no_grad():
        layout = job.layout

        def losses(batch: Batch) -> torch.Tensor:
            inputs = prepare_inputs(batch, layout, mtp_num_layers=len(job.model.mtp), device=CPU)
            return job.model(inputs)

        batch = batches_of(layout)[0]
        lengths = batch.cu_seqlens.diff().tolist()
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        tokens = batch.token_ids.clone()
        if layout.dp_rank == 0:
            tokens[document == 1] = (tokens[document == 1] + 7) % config.vocab_size
        before, after = losses(batch), losses(packed_row(tokens, lengths))
        local = local_positions(len(tokens), layout.cp_rank, layout.cp)
        changed = (document[local] == 1) & (layout.dp_rank == 0)
        twins = packed_row(tokens[:LENGTH].repeat(2), [LENGTH, LENGTH])
        return {"before": before, "after": after, "changed": changed, "twins": losses(twins)}


def starve(process: Process, mesh: MeshConfig) -> dict[str, Any]:
    """A step in which every token goes to experts 0 and 1."""
    with start_job(process, MLA, mesh) as job:
        for layer in job.model.moe_layers().values():
            layer.router.expert_bias[0], layer.router.expert_bias[1] = 200.0, 100.0
        result = job.step()
        experts = [shard.name for shard in job.shards if shard.kind == "expert"]
        return {
            "result": dataclasses.asdict(result),
            "ep_rank": job.layout.ep_rank,
            "gradients": {name: job.optimizer.local[name] for name in experts},
        }


def break_step(process: Process, mesh: MeshConfig, kind: str, bad_rank: int) -> dict[str, Any]:
    """A good step, one whose gradient is not finite on `bad_rank` only, and another good one."""
    with start_job(process, MLA, mesh, adamw=True) as job:
        first = job.step(seed=0)
        before = job.state()
        handle = None
        if process.rank == bad_rank and kind == "loss":
            handle = job.model.output_layer.register_forward_hook(
                lambda module, args, output: (output[0] * float("nan"), output[1])
            )
        elif process.rank == bad_rank:
            shard = next(shard for shard in job.shards if shard.kind == "expert")

            def spoil(parameter: torch.nn.Parameter) -> None:
                assert parameter.grad is not None
                parameter.grad.to_local()[0, 0, 0] = float("inf")

            handle = shard.parameter.register_post_accumulate_grad_hook(spoil)
        broken = job.step(seed=1)
        after = job.state()
        if handle is not None:
            handle.remove()
        last = job.step(seed=1)
        return {
            "skipped": [step.skipped for step in (first, broken, last)],
            "norms": [step.grad_norm for step in (first, broken, last)],
            "changed": [name for name in before if not torch.equal(before[name], after[name])],
            "moved": [name for name in before if not torch.equal(after[name], job.state()[name])],
            "kinds": set(before),
        }


def balance(process: Process, mesh: MeshConfig) -> dict[str, Any]:
    """Tokens that this rank routed to each expert of each layer, and the biases they lead to."""
    from megacomposer.model.inputs import prepare_inputs

    with start_job(process, MLA, mesh) as job:
        layers = job.model.moe_layers()

        def run() -> None:
            for batch in batches_of(job.layout):
                job.model(prepare_inputs(batch, job.layout, mtp_num_layers=2, device=CPU))

        def copies(of: str) -> dict[str, torch.Tensor]:
            values = {
                name: layer.tokens_per_expert if of == "counts" else layer.router.expert_bias
                for name, layer in layers.items()
            }
            return {name: value.clone() for name, value in values.items()}

        run()
        counts = copies("counts")
        metrics = job.train_step.balance.finish_step(apply=True)
        biases, cleared = copies("biases"), copies("counts")
        run()
        job.train_step.balance.finish_step(apply=False)
        return {
            "counts": counts,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "biases": biases,
            "cleared": {**cleared, **{f"{k} later": v for k, v in copies("counts").items()}},
            "biases after a skipped step": copies("biases"),
        }
