# Sourced by every launcher (bash). This is the one place for the settings of a site.

# What is already set wins, NCCL's variables included.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # results are bit-equal only at equal thread counts
# export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"  # a site's fabric goes here
export PYTHONSAFEPATH=1 # else ./kernels shadows the package `kernels` of Hugging Face

_launch="$(dirname "${BASH_SOURCE[0]}")"
ENTRY="${ENTRY:-$(realpath --relative-to="$PWD" "$_launch/../train.py")}" # the script to launch
_venv="${MEGACOMPOSER_VENV:-$_launch/../../.venv}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f "$_venv/bin/activate" ]; then . "$_venv/bin/activate"; fi

# dry_run_or ACTION COMMAND...: prints the command if DRY_RUN is set, else does ACTION with it.
dry_run_or() {
  local line
  if [ -z "${DRY_RUN:-}" ]; then "$@"; else shift && printf -v line '%q ' "$@" && echo "${line% }"; fi
}

# SIGUSR1 to a launcher means: save a checkpoint and stop. torchrun does not pass it on (told to
# by --signals-to-handle, it would kill the workers 30 s later), so it goes to the workers here.
run_torchrun() {
  # Ignored until the trainer installs its handler: neither torchrun nor a worker dies of it.
  (trap '' USR1 && exec "$@") &
  wait_forwarding signal_workers $!
}

# Runs srun, which passes SIGUSR1 on to its tasks by itself.
run_srun() {
  srun "$@" &
  wait_forwarding "kill -USR1" $!
}

# wait_forwarding ON_USR1 PID: the exit code of child PID. A signal ends bash's `wait`, with a code
# that says nothing about the child, so it waits again after each one.
wait_forwarding() {
  local pid="$2" status=127 code again=1
  trap "again=1; $1 $pid || true" USR1
  trap "again=1; kill -TERM $pid || true" TERM INT HUP
  while ((again)); do
    again=0
    wait "$pid" && code=0 || code=$?
    ((code == 127)) || status=$code # 127: the child's code was read before the last signal
  done
  trap - USR1 TERM INT HUP
  return "$status"
}

# Sends SIGUSR1 to the children of process $1 to which torchrun gave a rank, and to nothing else.
signal_workers() {
  local folder stat parent
  for folder in /proc/[0-9]*; do
    { read -r stat <"$folder/stat"; } 2>/dev/null || continue # the process has just ended
    read -r _ parent _ <<<"${stat##*) }"
    if [ "$parent" = "$1" ] && grep -qsz '^LOCAL_RANK=' "$folder/environ"; then
      kill -USR1 "${folder#/proc/}" || true
    fi
  done
}
