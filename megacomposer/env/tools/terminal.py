"""The terminal: named shells whose state outlives the process that runs a command.

Each call is one bash. Before the command it reads the shell's state from a file in the sandbox's
HOME, after it writes the state back: directory, variables, functions, aliases, options, umask.
So the state is part of snapshots and forks, and a command that is killed leaves it as it was.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megacomposer.env.sandbox import WORKDIR, Sandbox, Status
from megacomposer.env.tools.observation_text import OBSERVATION_BYTES, clip_middle, ending
from megacomposer.env.tools.schema import Arguments, Tool, ToolError

TERMINAL_ENV = {
    # Nobody can answer a pager, an editor or a prompt.
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "EDITOR": "false",
    "VISUAL": "false",
    "GIT_EDITOR": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "TERM": "dumb",
}
MAX_TIMEOUT_S = 600.0

# The command comes on stdin, so that argv does not limit its length. Functions are defined before
# the state is read: an alias of the agent is not expanded in them. The agent's options (`set -e`,
# `-u`, `-x`) are set last and cleared first, so that they act on its command only. The new state
# is written beside the old one and renamed by the last step: it is saved whole or not at all.
_PRELUDE = r"""
exec 2>&1
__t_command=$(command -p cat)
exec </dev/null
__t_directory=$HOME/.terminal
__t_state=$__t_directory/$2
set --

__t_set_options() {
  local IFS=: option
  for option in $SHELLOPTS; do
    [[ :$__t_shellopts: == *:$option:* ]] || set +o "$option"
  done
  for option in $BASHOPTS; do
    [[ :$__t_bashopts: == *:$option:* ]] || shopt -u "$option"
  done
  for option in $__t_bashopts; do shopt -s "$option"; done
  for option in $__t_shellopts; do
    case $option in
      noexec|onecmd|privileged) ;;
      xtrace|verbose) __t_command="set -o $option; $__t_command" ;;
      *) set -o "$option" ;;
    esac
  done
  return 0
}

__t_write_state() {
  local names flags name
  builtin printf '__t_pwd=%q\n' "$PWD"
  builtin printf '__t_shellopts=%q\n__t_bashopts=%q\n' "$__t_shellopts" "$__t_bashopts"
  builtin printf '%s\n' "$__t_umask"
  mapfile -t names <<<"$(compgen -v)"
  for name in "${names[@]}"; do
    case $name in
      BASH*|DIRSTACK|EUID|UID|PPID|GROUPS|SHELLOPTS|SHLVL|FUNCNAME|PIPESTATUS|LINENO|RANDOM) ;;
      SRANDOM|SECONDS|EPOCH*|COMP_*|HISTCMD|PWD|_|MAPFILE|__t_*|names|flags|name) ;;
      *) builtin declare -p "$name" ;;
    esac
  done
  while IFS=' ' read -r _ flags name; do
    case $name in __t_*|'') continue ;; esac
    builtin declare -f "$name"
    case $flags in *x*) builtin printf 'export -f %q\n' "$name" ;; esac
  done <<<"$(builtin declare -F)"
  alias -p
  builtin printf '# end\n'
}

__t_save() {
  [[ -z ${__t_saved:-} ]] || return 0
  __t_saved=1 __t_shellopts=$SHELLOPTS __t_bashopts=$BASHOPTS
  set +eEuxvnTCkm +o posix +o pipefail
  trap - ERR DEBUG RETURN
  __t_umask=$(umask -p)
  umask 077
  __t_write_state >|"$__t_state.$$" && command -p mv -f -- "$__t_state.$$" "$__t_state" ||
    __t_lost=1
}

__t_end() {
  local code=$?
  __t_save
  [[ -z ${__t_lost:-} ]] || builtin printf '[the state of this shell could not be saved]\n'
  __t_lost=
  exit "$code"
}

[[ -d $__t_directory ]] || command -p mkdir -p -- "$__t_directory"
shopt -s expand_aliases
if [[ -r $__t_state ]]; then
  for __t_name in $(compgen -e); do
    case $__t_name in PWD|SHLVL|SHELLOPTS|BASHOPTS) ;; *) unset "$__t_name" ;; esac
  done
  . "$__t_state" 2>/dev/null
  __t_old=${OLDPWD-}
  builtin cd -- "$__t_pwd" 2>/dev/null ||
    builtin printf '[%s is gone; the directory is now %s]\n' "$__t_pwd" "$PWD"
  [[ -z $__t_old ]] || OLDPWD=$__t_old
  __t_set_options 2>/dev/null
fi
trap '{ __t_end; } 2>/dev/null' EXIT
"""
# All on the first line, so that bash's messages count lines from the command's first.
_MAIN = """eval "$1"; eval "$__t_command"
{ (exit $?); __t_end; } 2>/dev/null
"""


class Command(Arguments, frozen=True, kw_only=True):
    command: Annotated[
        str,
        Meta(min_length=1, description="Bash, of any number of lines. Stdin is empty."),
    ]
    timeout_s: Annotated[
        float,
        Meta(ge=0.1, le=MAX_TIMEOUT_S, description="Seconds until everything is killed."),
    ] = 120.0
    shell: Annotated[
        str,
        Meta(pattern="^[a-z0-9_-]{1,32}$", description="Each name is a shell of its own."),
    ] = "main"


class Terminal:
    """The tool over one sandbox."""

    def __init__(self, sandbox: Sandbox, *, observation_bytes: int = OBSERVATION_BYTES) -> None:
        self._sandbox = sandbox
        self._observation_bytes = observation_bytes

    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                name="terminal",
                description=f"Run a bash command; the first one starts in {WORKDIR}. Directory,"
                " variables, functions, aliases and options stay for the next call. Stdout and"
                " stderr come together. There is no keyboard: pagers, editors and prompts end at"
                " once. Processes started with & live on; send their output to a file.",
                arguments=Command,
                run=self._run,
                programs=("bash",),
            ),
        )

    async def _run(self, arguments: Command) -> str:
        if "\0" in arguments.command:
            raise ToolError("bad_arguments", "A command cannot hold a NUL character.")
        result = await self._sandbox.exec(
            ["bash", "--noprofile", "--norc", "-c", _MAIN, "bash", _PRELUDE, arguments.shell],
            env=TERMINAL_ENV,
            stdin=arguments.command.encode(),
            timeout_s=arguments.timeout_s,
        )
        # A line of stderr comes from before `exec 2>&1`: bash could not start.
        output = (result.stderr + result.stdout).decode("utf-8", "replace")
        output = clip_middle(output, self._observation_bytes - 300).rstrip("\n")
        how = ending(result, arguments.timeout_s, self._sandbox.spec.limits)
        if how:
            kind = "timeout" if result.status is Status.TIMEOUT else "limit"
            if result.status is Status.SIGNALED:
                kind = "failed"
            lines = [output, f"[{how} The shell is as it was before this command.]"]
            raise ToolError(kind, "\n".join(line for line in lines if line))
        notes = [f"[exit code {result.exit_code}]"] if result.exit_code else []
        if not output and not notes:
            notes = ["[no output]"]
        return "\n".join([output, *notes] if output else notes)
