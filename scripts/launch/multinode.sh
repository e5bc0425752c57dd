#!/usr/bin/env bash
# One node of several; run the same line on each, NODE_RANK aside (srun does: scripts/slurm).
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/launch/multinode.sh [--dry-run] RECIPE [...]
#   NNODES          nodes of the job
#   NODE_RANK       0 on the node that MASTER_ADDR names (default under SLURM: SLURM_NODEID)
#   MASTER_ADDR     a name or address of node 0 that all nodes reach; MASTER_PORT (default 29500)
#   NPROC_PER_NODE  training processes of this node (default: one per GPU)
#   JOB_ID          tells jobs that share a port apart (default under SLURM: SLURM_JOB_ID)
#   ENTRY           another entry script to launch (default scripts/train.py)
# kill -USR1 of this script, on every node, saves a checkpoint and stops; the same line resumes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=1
  shift
fi
node_rank="${NODE_RANK:-${SLURM_NODEID:-}}"
if [ $# -lt 1 ] || [ -z "${NNODES:-}" ] || [ -z "$node_rank" ] || [ -z "${MASTER_ADDR:-}" ]; then
  sed -n 's/^# //; 2,10p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi

# Node 0 is told that it hosts the rendezvous: torchrun's own guess compares host names, and is
# wrong where MASTER_ADDR is an alias or the address of one of several interfaces.
dry_run_or run_torchrun torchrun \
  --nnodes "$NNODES" \
  --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
  --rdzv-id "${JOB_ID:-${SLURM_JOB_ID:-megacomposer}}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
  --rdzv-conf "is_host=$((node_rank == 0)),read_timeout=300" \
  "$ENTRY" "$@"
