"""Packages and the optional C++ build; everything else about the project is in pyproject.toml.

`kernels/` at the root is installed as `megacomposer.kernels`: a top-level module `kernels` would
shadow the Hugging Face package of that name. The committed symlink megacomposer/kernels is what
a checkout on PYTHONPATH uses; the mapping below is what an install uses.

MEGACOMPOSER_SKIP_CSRC=1 skips the C++ build. CXX names the compiler (default g++).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeLibrary:
    """A C++ file with a plain C ABI, built to a shared library that ctypes loads."""

    source: str
    """Path from the root."""
    module: str
    """Dotted place of the library: `a.b._c` is built as a/b/_c.so."""
    instead: str
    """What the code uses when the library is not there."""


NATIVE_LIBRARIES = (
    NativeLibrary(
        source="csrc/minhash.cpp",
        module="megacomposer.data._minhash",
        instead="the numpy implementation (same signatures, slower)",
    ),
)


class BuildNativeLibraries(build_ext):
    """Compiles `NATIVE_LIBRARIES`; a library that cannot be built never blocks the install."""

    def get_ext_filename(self, fullname: str) -> str:
        # No ABI tag: the libraries do not touch the Python C API.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        (library,) = (item for item in NATIVE_LIBRARIES if item.source == ext.sources[0])
        target = Path(self.get_ext_fullpath(ext.name))
        # An old library must not outlive a failed build: neither here nor in an editable tree.
        target.unlink(missing_ok=True)
        if self.editable_mode:
            (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        reason = _compile(ROOT / library.source, target)
        if reason:
            _announce(f"{library.source} is not built ({reason}); used instead: {library.instead}")
        else:
            _announce(f"{library.source} is built as {library.module}")


def _compile(source: Path, target: Path) -> str:
    """Builds `target`; returns why not, or the empty string."""
    if os.environ.get("MEGACOMPOSER_SKIP_CSRC", "0") not in ("", "0"):
        return "MEGACOMPOSER_SKIP_CSRC is set"
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        return f"no compiler {compiler[0]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, "-O3", "-std=c++17", "-shared", "-fPIC", "-o", str(target), str(source)]
    plain_english = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, env=plain_english)
    if result.returncode == 0:
        return ""
    target.unlink(missing_ok=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    return f"{compiler[0]} failed: {(errors or ['exit ' + str(result.returncode)])[0].strip()}"


def _announce(message: str) -> None:
    # pip shows this under -v only; scripts/setup_env.sh reads it back from the build's log.
    print(f"megacomposer: {message}", flush=True)


def _packages() -> list[str]:
    """Every room and its subpackages; kernels by its real folder, whether or not symlinked."""
    rooms = find_packages(
        str(ROOT),
        include=["megacomposer", "megacomposer.*"],
        exclude=["megacomposer.kernels", "megacomposer.kernels.*"],
    )
    inner = find_packages(str(ROOT / "kernels"))
    return [
        *rooms,
        "megacomposer.kernels",
        *(f"megacomposer.kernels.{name}" for name in inner),
    ]


setup(
    packages=_packages(),
    package_dir={"megacomposer": "megacomposer", "megacomposer.kernels": "kernels"},
    ext_modules=[
        # Optional: an editable install copies the result only when it exists.
        Extension(library.module, [library.source], optional=True)
        for library in NATIVE_LIBRARIES
        if (ROOT / library.source).exists()
    ],
    cmdclass={"build_ext": BuildNativeLibraries},
    zip_safe=False,
)
