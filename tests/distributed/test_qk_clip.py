"""QK-clip on the real model: what it measures and scales, on one rank and on layouts of two."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_model import CPU, GQA, MLA, batches_of, start_cpu_process, start_job

from megacomposer.kernels.attention_logits import max_logits_reference
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.sharding import gather_to_global
from megacomposer.model.config import ModelConfig
from megacomposer.optim.config import OptimConfig
from runner import run_distributed
from small_run import small_config, write_corpus

PLAIN_GQA = dataclasses.replace(GQA, qk_norm=False)
MODELS = {
    "mla": MLA,
    "mla, direct queries": dataclasses.replace(MLA, q_lora_rank=0, mtp_num_layers=0),
    "gqa": PLAIN_GQA,
}
LAYOUTS = {
    "tp2": MeshConfig(tp=2),
    "fsdp2": MeshConfig(),
    "cp2": MeshConfig(cp=2),
    "replicas": MeshConfig(dense_shard=1, expert_shard=1),
}
Weights = dict[str, torch.Tensor]


def attention_weights(job: Any) -> Weights:
    """Every weight of an attention module, whole."""
    return {
        shard.name: gather_to_global(shard.layout, shard.local)
        for shard in job.shards
        if ".self_attention." in shard.name
    }


def given_maxima(layers: int, heads: int, threshold: float) -> torch.Tensor:
    """Some below the threshold, one at it, some above, one never seen."""
    generator = torch.Generator().manual_seed(1)
    maxima = torch.rand(layers, heads, generator=generator) * 2 * threshold
    maxima[0, 0], maxima[-1, -1] = threshold, float("-inf")
    return maxima


def clip_on_layout(process: Any, config: ModelConfig, mesh: MeshConfig, threshold: float) -> Any:
    """Maxima of one step, and the weights after a clip by these and by given ones."""
    from megacomposer.optim.qk_clip import QKClip

    with start_job(process, config, mesh) as job:
        clip = QKClip(job.model, job.layout, job.shards, threshold=threshold)
        job.step()
        maxima = clip.reduce_maxima().clone()
        before = attention_weights(job)
        given = given_maxima(*maxima.shape, threshold)
        clip.rescale(clip.gammas(given))
        after = attention_weights(job)
        calls: list[Any] = []
        all_reduce = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda *a, **k: calls.append(a) or all_reduce(*a, **k)
        metrics = clip.finish_step(apply=True)
        torch.distributed.all_reduce = all_reduce
        return {
            "maxima": maxima,
            "given": given,
            "before": before,
            "after": after,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "collectives": len(calls),
            "forgotten": bool((clip.reduce_maxima() == float("-inf")).all()),
        }


def clip_on_two_ranks(thresholds: dict[str, float]) -> dict[tuple[str, str], Any]:
    with start_cpu_process() as process:
        return {
            (name, layout): clip_on_layout(process, config, mesh, thresholds[name])
            for name, config in MODELS.items()
            for layout, mesh in LAYOUTS.items()
        }


class Attentions:
    """Records what enters each attention module and its core; or replays the former."""

    def __init__(self, model: Any) -> None:
        from megacomposer.model.attention import CoreAttention

        self.replay = False
        self.inputs: dict[str, list[Any]] = defaultdict(list)
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, module in model.named_modules():
            if name.endswith(".self_attention"):
                hook = self._hook(name)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            if isinstance(module, CoreAttention):
                module.register_forward_pre_hook(self._core_hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if self.replay:
                return self.inputs[name].pop(0)
            self.inputs[name].append((args, kwargs))
            return None

        return hook

    def _core_hook(self, name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            query, key, _, segments = args[:4]
            scale = module.softmax_scale or query.shape[-1] ** -0.5
            largest = max_logits_reference(
                query.detach()[:, 0],
                key.detach()[:, 0],
                cu_seqlens=segments.cu_seqlens,
                softmax_scale=scale,
            )
            self.logits[name].append(largest)

        return hook

    def maxima(self) -> torch.Tensor:
        """Of all calls so far, float64 [layers, heads]; forgets them."""
        found = torch.stack([torch.stack(calls).amax(0) for calls in self.logits.values()])
        self.logits.clear()
        return found


def run_forwards(job: Any) -> None:
    from megacomposer.model.inputs import prepare_inputs

    depths = len(job.model.mtp)
    batches = batches_of(job.layout)
    tokens = sum(len(batch.token_ids) for batch in batches)
    job.train_step.balance.start_step(num_tokens=tokens * job.layout.dp)
    for batch in batches:
        job.model(prepare_inputs(batch, job.layout, mtp_num_layers=depths, device=CPU)).sum()


def measure_then_clip(process: Any, config: ModelConfig) -> dict[str, Any]:
    """The maxima of one step; then those of the same inputs after a clip at their median."""
    from megacomposer.optim.qk_clip import QKClip
    from megacomposer.train.evaluate import evaluate

    with start_job(process, config, MeshConfig()) as job:
        clip = QKClip(job.model, job.layout, job.shards, threshold=1e9)
        attentions = Attentions(job.model)
        job.step()
        measured = clip.reduce_maxima().clone()
        seen = attentions.maxima()
        clip.finish_step(apply=True)
        evaluate(job.model, job.layout, batches_of(job.layout), device=CPU)
        after_evaluation = clip.reduce_maxima().clone()
        attentions.logits.clear()
        attentions.inputs.clear()

        threshold = float(measured.median())
        clip = QKClip(job.model, job.layout, job.shards, threshold=threshold)
        job.step()
        metrics = clip.finish_step(apply=True)
        attentions.replay = True
        run_forwards(job)
        return {
            "measured": measured,
            "seen": seen,
            "after evaluation": after_evaluation,
            "threshold": threshold,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "replayed": clip.reduce_maxima().clone(),
        }


def skip_a_step(process: Any) -> dict[str, Any]:
    from megacomposer.optim.qk_clip import QKClip

    with start_job(process, MLA, MeshConfig(), adamw=True) as job:
        clip = QKClip(job.model, job.layout, job.shards, threshold=1e-3)
        job.train_step.qk_clip = clip
        before = job.state()
        handle = job.model.output_layer.register_forward_hook(
            lambda module, hidden, output: (output[0] * float("nan"), output[1])
        )
        skipped = job.step()
        handle.remove()
        after = job.state()
        maxima = clip.reduce_maxima().clone()
        good = job.step()
        return {
            "skipped": skipped.skipped,
            "metrics": [skipped.qk_clip, good.qk_clip],
            "changed": [name for name in before if not torch.equal(before[name], after[name])],
            "maxima": maxima,
        }


def recomputed_maxima(process: Any) -> torch.Tensor:
    from megacomposer.optim.qk_clip import QKClip

    with start_job(process, dataclasses.replace(MLA, recompute="full"), MeshConfig()) as job:
        clip = QKClip(job.model, job.layout, job.shards, threshold=1.0)
        job.step()
        return clip.reduce_maxima().clone()


def refusal(process: Any) -> str:
    from megacomposer.optim.qk_clip import QKClip

    with start_job(process, GQA, MeshConfig()) as job:
        try:
            QKClip(job.model, job.layout, job.shards, threshold=100.0)
        except ValueError as error:
            return str(error)
        return ""


def clip_on_one_rank() -> dict[str, Any]:
    with start_cpu_process() as process:
        outcome: dict[str, Any] = {
            name: measure_then_clip(process, config) for name, config in MODELS.items()
        }
        return outcome | {
            "skipped": skip_a_step(process),
            "recomputed": recomputed_maxima(process),
            "refusal": refusal(process),
        }


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return run_distributed(clip_on_one_rank, 1, init_process_group=False)[0]


@pytest.fixture(scope="module")
def two_ranks(one_rank: dict[str, Any]) -> list[dict[tuple[str, str], Any]]:
    thresholds = {name: one_rank[name]["threshold"] for name in MODELS}
    return run_distributed(clip_on_two_ranks, 2, thresholds, init_process_group=False)


@pytest.mark.parametrize("name", MODELS)
def test_largest_logit_is_that_of_every_forward_and_no_evaluation(one_rank, name: str) -> None:
    outcome = one_rank[name]
    layers = MODELS[name].num_layers + MODELS[name].mtp_num_layers
    assert outcome["measured"].shape == (layers, MODELS[name].num_attention_heads)
    torch.testing.assert_close(outcome["measured"], outcome["seen"].float())
    assert (outcome["after evaluation"] == float("-inf")).all()


def test_recomputation_changes_no_maximum(one_rank) -> None:
    assert torch.equal(one_rank["recomputed"], one_rank["mla"]["measured"])


def gammas_by_hand(name: str, maxima: torch.Tensor, threshold: float) -> torch.Tensor:
    """[layers, heads]; the GQA model's four heads are two groups."""
    gammas = torch.where(maxima > threshold, torch.full_like(maxima, threshold) / maxima, 1.0)
    if name != "gqa":
        return gammas
    smallest = [torch.minimum(gammas[:, i], gammas[:, i + 1]) for i in (0, 2)]
    return torch.stack([smallest[0], smallest[0], smallest[1], smallest[1]], dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_same_inputs_give_at_most_the_threshold_after_the_clip(one_rank, name: str) -> None:
    outcome = one_rank[name]
    threshold, before, after = (outcome[key] for key in ("threshold", "measured", "replayed"))
    gammas = gammas_by_hand(name, before, threshold)
    clipped = gammas < 1
    assert clipped.any()
    assert not clipped.all()
    assert float(after.max()) <= threshold * (1 + 1e-5)
    torch.testing.assert_close(after, before * gammas, rtol=1e-5, atol=1e-6)
    assert outcome["metrics"]["optim/max_attention_logit"] == float(before.max())
    assert outcome["metrics"]["optim/qk_clipped_heads"] == float(clipped.sum())


def by_hand(name: str, weight: torch.Tensor, gamma: torch.Tensor, config: ModelConfig) -> Any:
    """The clipped weight, head by head; gamma [heads]."""
    expected = weight.clone()
    mla = config.attention == "mla"
    for head, one in enumerate(gamma):
        root = one.sqrt()
        nope, rope, size = config.qk_nope_head_dim, config.qk_rope_head_dim, config.gqa_head_dim
        if mla and ("linear_q_up_proj" in name or "linear_q_proj" in name):
            start = head * (nope + rope)
            expected[start : start + nope] *= root
            expected[start + nope : start + nope + rope] *= one
        elif mla and "linear_kv_up_proj" in name:
            start = head * (nope + config.v_head_dim)
            expected[start : start + nope] *= root
        elif "linear_qkv" in name:  # groups of two query heads, a key and a value
            group, member = divmod(head, 2)
            start = (group * 4 + member) * size
            expected[start : start + size] *= root
            if member == 0:
                key = (group * 4 + 2) * size
                expected[key : key + size] *= root
    return expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_given_maxima_give_the_same_bits_on_every_layout(one_rank, two_ranks, name, layout) -> None:
    config, threshold = MODELS[name], one_rank[name]["threshold"]
    for outcome in (by_case[name, layout] for by_case in two_ranks):
        gammas = gammas_by_hand(name, outcome["given"], threshold)
        assert outcome["before"].keys() == outcome["after"].keys()
        layers = sorted({key.split("self_attention")[0] for key in outcome["before"]})
        changed = set()
        for key, weight in outcome["before"].items():
            gamma = gammas[layers.index(key.split("self_attention")[0])]
            assert torch.equal(outcome["after"][key], by_hand(key, weight, gamma, config)), key
            if not torch.equal(outcome["after"][key], weight):
                changed.add(key.removesuffix(".weight").rsplit(".", 1)[-1])
        queries = "linear_q_up_proj" if config.q_lora_rank else "linear_q_proj"
        assert changed == ({"linear_qkv"} if name == "gqa" else {queries, "linear_kv_up_proj"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_measures_the_same(one_rank, two_ranks, name, layout) -> None:
    for outcome in (by_case[name, layout] for by_case in two_ranks):
        expected = one_rank[name]["measured"]
        torch.testing.assert_close(outcome["maxima"], expected, rtol=1e-5, atol=1e-6)
        assert outcome["collectives"] == 1
        assert outcome["forgotten"]
        assert outcome["metrics"]["optim/max_attention_logit"] == float(outcome["maxima"].max())
        assert torch.equal(outcome["maxima"], two_ranks[0][name, layout]["maxima"])


def test_skipped_step_clips_nothing_and_forgets_its_logits(one_rank) -> None:
    outcome = one_rank["skipped"]
    assert outcome["skipped"]
    assert outcome["changed"] == []
    assert (outcome["maxima"] == float("-inf")).all()
    skipped, good = outcome["metrics"]
    assert skipped["optim/qk_clipped_heads"] == 0.0
    assert good["optim/qk_clipped_heads"] > 8.0


def test_model_with_query_and_key_norms_is_refused(one_rank) -> None:
    assert "model.qk_norm" in one_rank["refusal"]
    assert "set optim.qk_clip_threshold to 0" in one_rank["refusal"]


def train_with(corpus: str, run_dir: str, optimizer: str, mesh: MeshConfig) -> None:
    from megacomposer.train.loop import train

    base = small_config(corpus, run_dir)
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_std=0.1),
        mesh=mesh,
        optim=OptimConfig(name=optimizer, lr=1e-5, qk_clip_threshold=0.5),
        train=dataclasses.replace(base.train, num_steps=3, micro_batch_size=4),
        observe=dataclasses.replace(base.observe, log_interval_steps=1),
    )
    assert train(config) == 3


@pytest.mark.parametrize(
    ("optimizer", "mesh"), [("adamw", MeshConfig(tp=2)), ("muon", MeshConfig(ep=2))]
)
def test_training_loop_clips_with_any_optimizer_and_logs_it(
    optimizer: str, mesh: MeshConfig, tmp_path: Path
) -> None:
    corpus, run_dir = str(write_corpus(tmp_path)), tmp_path / "run"
    run_distributed(train_with, 2, corpus, str(run_dir), optimizer, mesh, init_process_group=False)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    largest = [step["optim/max_attention_logit"] for step in steps]
    assert len(largest) == 3
    # The learning rate moves next to nothing. Other batches may exceed the threshold of 0.5 again.
    assert largest[0] > 1.0
    assert steps[0]["optim/qk_clipped_heads"] > 0.0
    assert max(largest[1:]) < 0.75
