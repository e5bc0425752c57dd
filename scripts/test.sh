#!/usr/bin/env bash
# Lint, types, import layers, then the tests: what CI runs.
#   bash scripts/test.sh                    everything (GPU tests skip where there is no GPU)
#   bash scripts/test.sh tests/unit -k mesh  arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_env.sh

check() {
  local start=$SECONDS
  echo "== $*"
  "$@"
  echo "== $1: $((SECONDS - start)) s"
}

check ruff check --quiet --output-format concise .
check ruff format --check --quiet .
strict_rooms=()
for room in config env rollout; do
  [ -d "megacomposer/$room" ] && strict_rooms+=("megacomposer/$room")
done
check mypy "${strict_rooms[@]}"
check lint-imports --no-logo
echo "== pytest $*"
exec python -m pytest "$@"
