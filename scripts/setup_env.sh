# Makes the Python environment and activates it. Source it: `. scripts/setup_env.sh`.
#
# The first run installs, and needs a package index; later runs check a stamp and work offline.
#   MEGACOMPOSER_VENV    where the environment lives (default: .venv in this checkout)
#   MEGACOMPOSER_PYTHON  the interpreter to make it from (default: the first of python3.11 or newer)
# A torch >= 2.11 that is already in the environment is left alone, so a special build (another CUDA,
# CPU only) is installed there by hand first. On a GPU machine, so is the interpreter's own torch.

_mc_torch_pin="torch==2.13.0"
_mc_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_mc_venv="${MEGACOMPOSER_VENV:-$_mc_root/.venv}"

_mc_say() { printf 'setup: %s\n' "$*" >&2; }

# Runs a command quietly, its output kept in _mc_output, and says how long it took.
_mc_phase() {
  local title="$1" start=$SECONDS status=0
  shift
  _mc_say "$title ..."
  _mc_output="$("$@" 2>&1 </dev/null)" || status=$?
  if [ "$status" = 0 ]; then
    _mc_say "$title: done in $((SECONDS - start)) s"
  else
    printf '%s\n' "$_mc_output" | tail -n 20 >&2
    _mc_say "$title: FAILED with exit code $status after $((SECONDS - start)) s, as shown above"
  fi
  return "$status"
}

_mc_apt() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    _mc_say "missing: $*. Install it: sudo apt-get install $*"
    return 1
  fi
  _mc_phase "apt-get install $*" \
    env DEBIAN_FRONTEND=noninteractive sh -c \
    'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' sh "$@"
}

# Prints the first interpreter that is new enough.
_mc_find_python() {
  local name
  for name in ${MEGACOMPOSER_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

_mc_torch_works() {
  "$1" -c '
import re, sys, torch
sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11))' >/dev/null 2>&1
}

_mc_make_venv() {
  local python version options=()
  if [ -z "${MEGACOMPOSER_PYTHON:-}" ] && ! command -v python3 >/dev/null; then
    _mc_apt python3 python3-venv || return 1
  fi
  if ! python="$(_mc_find_python)"; then
    _mc_say "no Python 3.11 or newer (tried: ${MEGACOMPOSER_PYTHON:-python3, python3.11 to 3.13})." \
      "Install one and name it, as in MEGACOMPOSER_PYTHON=python3.12"
    return 1
  fi
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || _mc_apt "python$version-venv" || return 1
  if nvidia-smi -L >/dev/null 2>&1 && _mc_torch_works "$python"; then
    options=(--system-site-packages)
  fi
  _mc_phase "environment $_mc_venv with Python $version" \
    "$python" -m venv --clear ${options[@]+"${options[@]}"} "$_mc_venv"
}

# Sandboxes for coding environments; training needs none of it.
_mc_install_sandbox() {
  local program missing=()
  for program in bwrap:bubblewrap rg:ripgrep git:git curl:curl; do
    command -v "${program%%:*}" >/dev/null || missing+=("${program##*:}")
  done
  [ "${#missing[@]}" = 0 ] || _mc_apt "${missing[@]}" \
    || _mc_say "going on without; coding environments need bubblewrap, git and ripgrep"
  # Not every distribution packages gVisor.
  command -v runsc >/dev/null || _mc_apt runsc || _mc_say "going on without gVisor's runsc"
}

_mc_install() {
  local python="$_mc_venv/bin/python"
  "$python" -m pip --version >/dev/null 2>&1 || _mc_make_venv || return 1
  command -v g++ >/dev/null || _mc_apt g++ || _mc_say "going on without g++"
  _mc_install_sandbox
  if ! _mc_torch_works "$python"; then
    _mc_phase "pip install $_mc_torch_pin (the largest download)" \
      "$python" -m pip install "$_mc_torch_pin" || return 1
  fi
  # Build isolation would fetch setuptools again on every run, and so never work offline.
  _mc_phase "pip install 'setuptools>=77.0.3'" \
    "$python" -m pip install 'setuptools>=77.0.3' || return 1
  _mc_phase "pip install -e '.[dev,plot]'" \
    "$python" -m pip install -v --no-build-isolation -e "$_mc_root[dev,plot]" || return 1
  printf '%s\n' "$_mc_output" | sed -n 's/^ *megacomposer: /setup: /p' >&2  # the native builds
}

# What the environment was made from; editing any of it installs again.
_mc_fingerprint() {
  (cd "$_mc_root" && { pwd && cat setup.py pyproject.toml scripts/setup_env.sh \
    && find csrc -type f -exec sha256sum {} + 2>/dev/null | sort; } | sha256sum | cut -c1-64)
}

_mc_setup() {
  local stamp="$_mc_venv/megacomposer.stamp" fingerprint
  fingerprint="$(_mc_fingerprint)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
    return
  fi
  mkdir -p "$(dirname "$_mc_venv")"
  if ! _mc_install; then
    _mc_say "the environment is not complete. The first run needs a package index that pip can" \
      "reach; when the fault above is mended, run the same command again."
    return 1
  fi
  printf '%s\n' "$fingerprint" >"$stamp"
}

export PYTHONSAFEPATH=1 # else ./kernels shadows the package `kernels` of Hugging Face
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
_mc_setup && . "$_mc_venv/bin/activate"
