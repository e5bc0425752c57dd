#!/usr/bin/env bash
# What is run on one machine with two GPUs; ends within 10 minutes, what does not fit in is left out:
#   bash scripts/bench/two_gpus.sh [OUT_FOLDER] [PART ...]
#   OUT_FOLDER  of the results, from the root of the repository (default docs/benchmarks/h200x2)
#   PART        train links muon dispatch (default: all of them, in this order)
# No part needs another, except that `muon` predicts its step with what `links` left in OUT_FOLDER.
# One that fails does not stop the others; it is named at the end, and the exit status is 1.
# There is one process for each GPU, and every variable of NCCL stays as it is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:-docs/benchmarks/h200x2}"
shift || true
parts=("$@")
((${#parts[@]})) || parts=(train links muon dispatch)
for part in "${parts[@]}"; do
  [[ "$part" =~ ^(train|links|muon|dispatch)$ ]] || { sed -n 's/^# //; 2,6p' scripts/bench/two_gpus.sh >&2; exit 2; }
done
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! python3 -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
  echo "two_gpus.sh: needs a machine with 2 CUDA devices" >&2
  exit 2
fi
mkdir -p "$out"
failed=()

# run SECONDS COMMAND...: the command, noted among the failed ones if it fails.
run() {
  local seconds="$1" left=$((585 - SECONDS)) status=0
  shift
  ((seconds < left)) || seconds=$((left > 1 ? left : 1))
  timeout -k 10 "$seconds" "$@" || status=$?
  ((status == 0)) || failed+=("$part: exit status $status of $*")
  return "$status"
}

# ranks SECONDS SCRIPT...: the script on both GPUs.
ranks() {
  local seconds="$1"
  shift
  run "$seconds" python3 -m torch.distributed.run --standalone --nproc-per-node 2 "$@"
}

part_train() {
  local data=data/stdlib work trained
  work="$(mktemp -d)"
  run 60 python3 scripts/prepare_data.py --source stdlib --heldout_frac 0.02 --out "$data"
  # The command itself, with evaluation, a checkpoint and a completion, while other runs start.
  ranks 90 scripts/train.py tiny --run_dir "$work/tiny" --data.sources.0.prefix "$data/train" \
    --data.heldout_prefix "$data/heldout" --train.num_steps 30 --schedule.warmup_steps 5 \
    --train.eval_interval_steps 15 --train.eval_sequences 64 --observe.no-progress \
    >"$work/train.txt" 2>&1 &
  trained=$!
  run 245 python3 scripts/bench/two_gpu_training.py --data "$data/train" --budget-s 230 \
    --json "$out/training.jsonl"
  wait "$trained" || failed+=("train: scripts/train.py")
  cat "$work/train.txt"
  run 150 python3 -m pytest -q -p no:cacheprovider -m multi_gpu tests/gpu
  rm -r "$work"
}

part_links() {
  rm -f "$out/links.jsonl"
  ranks 60 scripts/bench/links.py --json "$out/links.jsonl"
}

part_muon() {
  local links=() kimi
  kimi=(--preset kimi_k2 --layers 1
    --change num_dense_layers=0 num_experts=96 mtp_num_layers=0 vocab_size=2560)
  rm -rf "$out"/muon_step.jsonl "$out"/muon_peers.jsonl
  # A mid-size MoE on three meshes; then a layer of Kimi K2 with the experts that two of its ranks have.
  ranks 120 scripts/bench/muon_step.py --meshes ep=1 ep=2 dense_shard=1,expert_shard=1 \
    --optimizers ours adamw --reserved-sms 8 16 --trace "$out/traces" --json "$out/muon_step.jsonl"
  ranks 70 scripts/bench/muon_step.py "${kimi[@]}" --meshes ep=1 --optimizers ours adamw \
    --json "$out/muon_step.jsonl"
  [ -f "$out/links.jsonl" ] && links=(--links "$out/links.jsonl")
  run 40 python3 scripts/bench/muon_scale.py --calibration "$out/muon_step.jsonl" --check "${links[@]}"
  ranks 100 scripts/bench/muon_step.py --meshes ep=1 --optimizers dion --json "$out/muon_peers.jsonl"
  ranks 40 scripts/bench/muon_step.py --meshes dense_shard=1,expert_shard=1 \
    --optimizers megatron_layer_wise --json "$out/muon_peers.jsonl"
}

part_dispatch() {
  local data=data/bpe ep
  local tokens=(--train.num_steps 20 --train.micro_batch_size 4 --train.global_batch_size 16)
  rm -f "$out/moe_exchange.jsonl" "$out/pretrain.jsonl"
  ranks 80 scripts/bench/moe_exchange.py --json "$out/moe_exchange.jsonl"
  ranks 40 scripts/bench/moe_exchange.py --peers vdev --json "$out/moe_exchange.jsonl"
  run 60 python3 scripts/bench/train_tokenizer.py --out data/bpe_tokenizer.json
  run 60 python3 scripts/prepare_data.py --source stdlib --tokenizer data/bpe_tokenizer.json \
    --out "$data" --heldout_frac 0.02
  for ep in 1 2; do
    run 90 python3 scripts/bench/pretrain.py qwen3_moe_1gpu --nproc 2 --label "ep=$ep" \
      --run-dir "$out/run_ep$ep" --json "$out/pretrain.jsonl" -- --mesh.ep "$ep" --data.sources.0.prefix "$data/train" \
      --data.heldout_prefix "$data/heldout" --data.tokenizer data/bpe_tokenizer.json "${tokens[@]}" \
      --schedule.warmup_steps 5 --train.eval_interval_steps 0 --checkpoint.no-save_final
    rm -rf "$out/run_ep$ep"
  done
}

for part in "${parts[@]}"; do
  echo "== $part"
  # No pipe: its subshell could not add to `failed`.
  exec 3> >(tee "$out/$part.txt")
  tee=$!
  "part_$part" >&3 2>&1
  exec 3>&-
  wait "$tee"
  echo "== $part: until second $SECONDS"
done
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
