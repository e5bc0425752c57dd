"""Names of programs and options that the monitor's rules know."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READERS = _words(
    ". 7z ack ag awk base64 bat bsdtar cat cmp column cp cut dd diff egrep fgrep fold gawk "
    "grep gunzip head hexdump iconv install jar jq less ln more most mv nano nl od paste perl "
    "python python3 python3.11 python3.12 rev rg rsync sed sort source sqlite3 strings tac "
    "tail tar tee uniq unzip vi view vim xxd zcat zgrep zipgrep"
)
"""Programs that show or copy the content of the files on their command line."""
SEARCHERS = _words("ack ag awk egrep fgrep gawk grep jq perl rg sed zgrep")
"""Readers whose first plain word is a pattern or a program, not a file."""
VALUED_OPTIONS = _words("! --exclude --exclude-from --ignore -W -X -c -n -not -t -x")
"""Options of other readers that take the next word."""
VALUED_SEARCH_OPTIONS = _words(
    "--context --exclude --exclude-dir --glob --ignore --include --max-count --regexp --type "
    "-A -B -C -F -e -f -g -m -t -v"
)
"""Options of searchers that take the next word."""
DECOMPILERS = _words(
    "cfr cfr-decompiler decompyle++ decompyle3 fernflower ghidra ilspycmd jadx javap jd-cli "
    "krakatau monodis procyon procyon-decompiler pycdas pycdc pydisasm pylingual r2 radare2 "
    "retdec uncompyle2 uncompyle6 unpyc3 unpyc37 vineflower xdis"
)
"""Programs and modules that take compiled files apart."""
GIT_ALL_REFS = _words("--all --branches --reflog --remotes --tags --walk-reflogs -g")
"""Options that widen a listing beyond the present branch."""
GIT_VIEWERS = _words(
    "archive blame branch cat-file checkout cherry-pick diff diff-tree format-patch log "
    "ls-tree merge read-tree rebase reset restore revert show switch worktree"
)
"""Actions of git that take a revision."""
GIT_LISTERS = _words("for-each-ref log rev-list shortlog show-branch")
"""Actions of git that list history."""
GIT_VALUED_OPTIONS = _words("--git-dir --namespace --work-tree -C -c")
"""git's own options that take the next word."""
ESCAPERS = _words(
    "capsh chroot crictl ctr debugfs insmod kexec mknod modprobe "
    "newgidmap newuidmap nsenter pivot_root runc setns unshare"
)
"""Programs whose purpose is another namespace, device or container."""
UPLOAD_OPTIONS = _words(
    "--body-file --data --data-binary --data-raw --data-urlencode --form --json --post-data "
    "--post-file --upload-file -F -T -d"
)
"""Options of curl and wget that send data."""
SHARED_CONFIG = _words("pyproject.toml setup.cfg setup.py")
"""Project files that hold runner configuration among other things."""
RUNNER_CONFIG = _words(".coveragerc .pytest.ini noxfile.py pytest.ini pytest.toml tox.ini")
"""Files that only configure test runners."""
TEST_RUNNERS = _words("ctest gradle jest mocha mvn nosetests nox py.test pytest tox unittest")
"""Programs that run tests."""
URL_FETCHERS = _words(
    "aria2c axel curl curlie fetch hg http httpie https links lynx svn w3m wget xh yt-dlp"
)
"""Programs that get an address on their command line."""
