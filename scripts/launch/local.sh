#!/usr/bin/env bash
# One machine: bash scripts/launch/local.sh [--dry-run] NPROC RECIPE [--section.field value ...]
#   NPROC    training processes, one per GPU (on a machine without a GPU, CPU processes with gloo)
#   ENTRY    environment: another entry script to launch (default scripts/train.py)
# kill -USR1 of this script saves a checkpoint and stops; the same command then resumes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=1
  shift
fi
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then
  sed -n 's/^# //; 2,5p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
nproc="$1"
shift

dry_run_or run_torchrun torchrun --standalone --nproc-per-node "$nproc" "$ENTRY" "$@"
