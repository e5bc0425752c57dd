"""The persistent shell: what stays, what ends, and what a command cannot do to the next one."""

from __future__ import annotations

from pathlib import Path

from megacomposer.env.sandbox import Limits
from tool_cases import Bench, call, run


def test_the_state_of_a_shell_stays_from_call_to_call(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        async def sh(command: str) -> str:
            return await bench.text("terminal", command=command)

        await sh(
            "mkdir sub; cd sub; export LONG=$'two\\nlines \"x\" $HOME'; plain=1; list=(a 'b c');"
            " declare -A map=([k]=v); unset GIVEN; umask 027"
        )
        await sh("greet() { echo hi $1; }; export -f greet; alias ll='echo listed'; OPTIND=3")
        await sh("shopt -s nullglob; set -o pipefail; readonly fixed=7")
        assert await sh("pwd; cd ..; pwd; cd - >/dev/null; pwd") == (
            "/workspace/sub\n/workspace\n/workspace/sub"
        )
        assert await sh(
            'echo "$LONG" $plain ${list[1]} ${map[k]} $fixed ${GIVEN-gone} $OPTIND'
        ) == ('two\nlines "x" $HOME 1 b c v 7 gone 3')
        assert await sh("greet you; bash -c 'greet child'; ll; umask; echo *.none") == (
            "hi you\nhi child\nlisted\n0027"
        )
        assert await sh("false | true; echo $?; env | grep -c LONG") == "1\n1"
        assert await sh("printenv plain || echo not exported") == "not exported"

    run(tmp_path, body, env={"GIVEN": "1"})


def test_options_of_the_agent_do_not_break_the_shell(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        async def sh(command: str) -> str:
            return await bench.text("terminal", command=command)

        assert await sh("set -e; x=1; false; echo no") == "[exit code 1]"
        assert await sh("echo $x $-; set -u -C -f") == "1 ehBc"
        assert (await sh("echo $nothing")).endswith("nothing: unbound variable\n[exit code 1]")
        assert await sh("set +euf; set -x; y=2") == "++ y=2"
        assert await sh("echo $y; set +x") == "++ echo 2\n2\n++ set +x"
        assert await sh("PATH=/nowhere; IFS=:; cd() { echo mine; }; alias printf=false") == (
            "[no output]"
        )
        assert await sh("cd; z=1; builtin cd /tmp; printf x") == "mine\n[exit code 1]"
        assert await sh("echo $z $PWD; PATH=/usr/bin:/bin") == "1 /tmp"
        assert await sh("trap 'echo bye' EXIT; w=3") == "bye"
        assert await sh("echo $w; set -o posix; set -n") == "3"
        assert await sh("echo still $w") == "still 3"

    run(tmp_path, body)


def test_exit_codes_and_messages_are_those_of_the_command(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        async def sh(command: str) -> str:
            return await bench.text("terminal", command=command)

        assert await sh("a=1; exit 3") == "[exit code 3]"
        assert await sh("echo $a; (exit 4)") == "1\n[exit code 4]"
        assert await sh("echo out; echo err >&2; echo out") == "out\nerr\nout"
        assert await sh("\n\nnocommand") == "bash: line 3: nocommand: command not found\n" + (
            "[exit code 127]"
        )
        assert "syntax error" in await sh("if then")
        assert await sh("cat <<X\n$a\nX") == "1"
        assert await sh("echo " + "y" * 200_000 + " | wc -c") == "200001"
        assert await sh("true") == "[no output]"
        killed = await bench.error("failed", "terminal", command="b=1; kill -9 $$")
        assert "signal 9. The shell is as it was before" in killed
        assert await sh("echo ${b-unset}") == "unset"

    run(tmp_path, body)


def test_nothing_waits_for_a_keyboard(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        command = (
            "read answer; echo read=$?; git init -q . && git add a && git -c user.name=a -c"
            " user.email=a@example.org commit; echo commit=$?; git --paginate diff --cached |"
            " head -1; cat; echo $TERM; test -t 0 || echo no terminal"
        )
        text = await bench.text("terminal", command=command, timeout_s=30)
        assert "read=1" in text
        assert "commit=1" in text
        assert text.endswith("dumb\nno terminal")

    run(tmp_path, body, {"a": "x\n"})


def test_a_command_that_runs_too_long_is_killed_and_the_shell_is_as_before(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.text("terminal", command="kept=1")
        text = await bench.error(
            "timeout",
            "terminal",
            command="kept=2; cd /; echo partial; trap '' TERM; (sleep 300 & sleep 300)",
            timeout_s=0.5,
        )
        assert text.startswith("partial\n[Killed after 0.5 s with everything that it started.")
        after = "echo $kept $PWD; pgrep sleep || echo none left"
        assert await bench.text("terminal", command=after) == "1 /workspace\nnone left"

    run(tmp_path, body)


def test_too_much_output_is_cut_in_the_middle_with_counts(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        text = await bench.text("terminal", command="seq 1 100000")
        lines = text.split("\n")
        assert (lines[0], lines[-1]) == ("1", "100000")
        note = next(index for index, line in enumerate(lines) if line.startswith("[..."))
        first, last = int(lines[note - 1]), int(lines[note + 1])
        assert f", {last - first - 1} lines left out" in lines[note]
        text = await bench.error("limit", "terminal", command="yes; echo no")
        assert "wrote more than 1048576 bytes" in text

    run(tmp_path, body, limits=Limits(output_bytes=1 << 20))


def test_background_jobs_live_on(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.text("terminal", command="sleep 300 & job=$!", timeout_s=30)
        assert await bench.text("terminal", command="kill -0 $job && echo alive") == "alive"
        await bench.text("terminal", command="kill $job")

    run(tmp_path, body)


def test_named_shells_are_apart_and_one_shell_takes_turns(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        calls = [call("terminal", command=f"trail=${{trail}}{i}; cd /tmp") for i in range(5)]
        calls.append(call("terminal", command="echo $trail $PWD", shell="other"))
        calls.append(call("terminal", command="echo $trail $PWD"))
        answers = await bench.tools.call_all(calls)
        assert answers[5].text == "/workspace"
        assert answers[6].text == "01234 /tmp"

    run(tmp_path, body)


def test_the_state_goes_into_snapshots_and_forks(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.text("terminal", command="mkdir sub; cd sub; x=1; f() { echo f$x; }")
        snapshot = await bench.sandbox.snapshot()
        async with await bench.sandbox.fork() as sandbox:
            twin = Bench(bench.tools.fork(sandbox), bench.log)
            await bench.text("terminal", command="x=2; cd ..; rmdir sub")
            assert await twin.text("terminal", command="f; pwd; x=3") == "f1\n/workspace/sub"
            assert await bench.text("terminal", command="f; pwd") == "f2\n/workspace"
        await bench.sandbox.restore(snapshot)
        assert await bench.text("terminal", command="f; pwd") == "f1\n/workspace/sub"

    run(tmp_path, body)


def test_a_directory_that_is_gone_or_a_full_disk_is_said(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.text("terminal", command="mkdir gone; cd gone; x=1; rmdir ../gone")
        text = await bench.text("terminal", command="pwd")
        assert text == "[/workspace/gone is gone; the directory is now /workspace]\n/workspace"
        text = await bench.text("terminal", command="x=2; head -c 99999999 /dev/zero > /tmp/fill")
        assert "No space left" in text
        assert "the state of this shell could not be saved" in text
        await bench.sandbox.exec(["rm", "/tmp/fill"])
        assert await bench.text("terminal", command="echo $x") == "1"

    run(tmp_path, body, limits=Limits(disk_bytes=32 << 20))
