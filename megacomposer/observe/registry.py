"""Every metric that a run may report: name -> what it is, with its unit.

A name is `area/name`. A last part `*` stands for any label, such as the name of an eval suite.
"""

from __future__ import annotations

AREAS = (
    "train",
    "optim",
    "perf",
    "time",
    "data",
    "rollout",
    "reward",
    "monitor",
    "sync",
    "eval",
    "system",
)

METRICS: dict[str, str] = {
    "train/loss": "Mean next-token cross entropy over the step's labels, nats per token.",
    "train/mtp_loss": "Mean of the multi-token-prediction losses over depths, nats per token.",
    "train/total_loss": "What is differentiated: loss plus weighted MTP and auxiliary losses.",
    "train/aux_loss": "Router load-balancing loss before its weight, dimensionless.",
    "train/tokens": "Tokens trained on since the start of the run, count.",
    "train/skipped_steps": "Steps since the start whose update was dropped as not finite, count.",
    "train/expert_load_max_over_mean": "Busiest expert's share over the mean, worst layer, ratio.",
    "train/expert_load_min_over_mean": "Idlest expert's share over the mean, worst layer, ratio.",
    "train/expert_bias_max": "Largest absolute router balance bias, in router-score units.",
    "train/policy_loss": "Policy-gradient part of the RL loss, dimensionless.",
    "train/distill_loss": "KL from the hinted teacher on hinted turns, nats per token.",
    "train/kl_k1": "k1 estimate of the KL from sampler to policy at action tokens, nats per token.",
    "train/kl_k3": "k3 estimate of the same KL, nats per token.",
    "train/entropy": "Estimate of the policy's entropy at action tokens, nats per token.",
    "train/clip_frac": "Share of action tokens whose importance ratio was clipped or masked.",
    "train/logprob_abs_diff": "Mean absolute gap of trainer and sampler log-probs, nats per token.",
    "train/advantage_mean": "Mean advantage over the batch's trajectories, reward units.",
    "train/advantage_std": "Standard deviation of those advantages, reward units.",
    "train/action_tokens": "Action tokens in the batch, count.",
    "optim/grad_norm": "Global L2 norm of the gradient before clipping.",
    "optim/lr": "Learning rate of the step, before per-shape scaling.",
    "optim/param_norm": "Global L2 norm of the parameters after the step.",
    "optim/update_norm": "Global L2 norm of the step's parameter change.",
    "optim/clip_scale": "Factor by which clipping scaled the gradient; 1 when it did not.",
    "optim/qk_clipped_heads": "Attention heads rescaled by QK-clip in the step, count.",
    "optim/max_attention_logit": "Largest attention logit of the step, before softmax.",
    "perf/tokens_per_s": "Tokens trained per second of the whole job.",
    "perf/tokens_per_s_per_gpu": "Tokens trained per second and device.",
    "perf/mfu": "Model FLOPs done over the device's dense bf16 peak, fraction; no recompute.",
    "perf/tflops_per_gpu": "Model TFLOP/s per device; recompute is not counted.",
    "perf/memory_allocated_gib": "Device memory in tensors after the step, GiB.",
    "perf/memory_peak_gib": "Largest device memory in tensors within the step, GiB.",
    "time/step_s": "Wall time of the step from data to update, seconds.",
    "time/data_s": "Part of it that waited for a batch, seconds.",
    "time/forward_backward_s": "Part of it in forward and backward, seconds.",
    "time/optimizer_s": "Part of it in gradient reduction, clipping and update, seconds.",
    "time/checkpoint_s": "Training time lost to saving a checkpoint, seconds.",
    "time/eval_s": "Wall time of an evaluation, seconds.",
    "time/rollout_s": "Mean wall time of a finished trajectory, seconds.",
    "time/wait_for_batch_s": "RL: time the trainer waited for trajectories, seconds.",
    "data/epoch": "Passes over the training data since the start, with its fraction.",
    "data/consumed_tokens": "Tokens read from the data since the start, count.",
    "data/consumed_samples": "Samples read from the data since the start, count.",
    "data/padding_frac": "Share of positions in the step that are padding or masked out.",
    "rollout/trajectories": "Trajectories that finished for this step, count.",
    "rollout/turns_mean": "Mean number of agent turns of a trajectory.",
    "rollout/tokens_mean": "Mean number of sampled tokens of a trajectory.",
    "rollout/tool_calls_mean": "Mean number of tool calls of a trajectory.",
    "rollout/tool_error_frac": "Share of tool calls that returned an error.",
    "rollout/summaries_mean": "Mean number of self-summaries of a trajectory.",
    "rollout/truncated_frac": "Share of trajectories stopped by a token, turn or time limit.",
    "rollout/infra_failures": "Trajectories masked because a sandbox or engine failed, count.",
    "rollout/retries": "Trajectories started again after such a failure, count.",
    "rollout/staleness_mean": "Mean policy versions between sampling and training.",
    "rollout/staleness_max": "Largest such distance in the batch, policy versions.",
    "rollout/dropped_stale": "Trajectories dropped because they were too old, count.",
    "rollout/in_flight": "Trajectories being sampled when the step began, count.",
    "rollout/sampled_tokens_per_s": "Tokens sampled per second over all engines.",
    "reward/mean": "Mean reward over the batch's trajectories.",
    "reward/std": "Standard deviation of those rewards.",
    "reward/pass_frac": "Share of trajectories whose hidden tests all pass.",
    "reward/solved_group_frac": "Share of groups in which every trajectory passes.",
    "reward/unsolved_group_frac": "Share of groups in which none does.",
    "reward/effort_penalty_mean": "Mean concave effort penalty subtracted from the reward.",
    "reward/part/*": "Mean of one named part of the reward.",
    "monitor/flagged_frac": "Share of trajectories that a reward-hacking monitor flagged.",
    "monitor/flagged/*": "Trajectories flagged by one named monitor rule, count.",
    "sync/policy_version": "Version of the weights that the engines were sent.",
    "sync/delta_bytes": "Size of the weight update as sent, bytes.",
    "sync/delta_frac": "Size of the weight update over that of the full weights.",
    "sync/publish_s": "Time to encode and publish a weight update, seconds.",
    "sync/load_s": "Time until the last engine served the new weights, seconds.",
    "eval/loss": "Cross entropy on held-out data, nats per token.",
    "eval/bits_per_byte": "Cross entropy on held-out data, bits per UTF-8 byte.",
    "eval/nats_per_byte": "Cross entropy on held-out data, nats per UTF-8 byte.",
    "eval/mtp_acceptance_frac/*": "Share of tokens that one MTP depth predicts as the head does.",
    "eval/pass_frac/*": "Share of one suite's tasks that are solved.",
    "eval/tokens_mean/*": "Mean sampled tokens per task of one suite.",
    "eval/tool_calls_mean/*": "Mean tool calls per task of one suite.",
    "system/nonfinite_values": "NaN or infinite metric values written as null so far, count.",
    "system/cpu_memory_gib": "Resident memory of the reporting process, GiB.",
    "system/disk_free_gib": "Free space where the run directory is, GiB.",
    "system/fallbacks": "Times since the start that a slower path was taken than asked for, count.",
}


def is_registered(name: str) -> bool:
    """Whether `name` may be written: it is a key of METRICS, or a label in the place of a `*`."""
    return name in METRICS or f"{name.rpartition('/')[0]}/*" in METRICS


def metric_table() -> str:
    """METRICS as a Markdown table."""
    rows = [f"| `{name}` | {description} |" for name, description in METRICS.items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])
