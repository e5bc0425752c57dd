#!/usr/bin/env bash
# From nothing to a trained model on two CPU cores, in minutes:
#   bash scripts/quickstart.sh                real code: Python's own standard library
#   bash scripts/quickstart.sh --repo PATH    real code: any git checkout or directory
# Installs into .venv, prepares a data set, trains the `tiny` recipe on 2 ranks, stops half-way,
# resumes, evaluates on held-out files, plots the loss and prints a completion.
#   --out DIR    run directory (default runs/quickstart; an earlier run there is replaced)
#   other options go to scripts/train.py, such as --train.num_steps 100
# The last line of stdout is one JSON object.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source=(--source stdlib) data=data/stdlib out=runs/quickstart overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --repo)
      [ -e "${2:-}" ] || { echo "quickstart: --repo needs a path that exists, got '${2:-}'" >&2; exit 2; }
      source=(--repo "$2") data="data/$(basename "$(realpath "$2")")"
      shift 2 ;;
    --out) out="${2:?quickstart: --out needs a directory}"; shift 2 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --*.*) overrides+=("$1" "${2:?quickstart: $1 needs a value}"); shift 2 ;;
    *) echo "quickstart: unknown option $1; see --help" >&2; exit 2 ;;
  esac
done
. scripts/setup_env.sh

if [ -e "$out" ]; then
  [ -f "$out/config.json" ] || { echo "quickstart: $out is not a run directory; name another --out" >&2; exit 2; }
  rm -r "$out"
fi
python scripts/prepare_data.py "${source[@]}" --out "$data" --heldout_frac 0.02
train() {
  bash scripts/launch/local.sh 2 tiny --run_dir "$out" --data.sources.0.prefix "$data/train" \
    --data.heldout_prefix "$data/heldout" ${overrides[@]+"${overrides[@]}"} "$@"
}
train --train.stop_after_steps 100
echo "quickstart: stopped after the first half; the same command resumes" >&2
train
python scripts/report.py "$out" --event quickstart
