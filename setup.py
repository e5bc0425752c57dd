"""Packages and the optional C++ and CUDA build; all else about the project is in pyproject.toml.

`kernels/` at the root is installed as `megacomposer.kernels`: a top-level module `kernels` would
shadow the Hugging Face package of that name. The committed symlink megacomposer/kernels is what
a checkout on PYTHONPATH uses; the mapping below is what an install uses.

MEGACOMPOSER_SKIP_CSRC=1 skips the build. CXX names the C++ compiler (default g++) and NVCC that of
CUDA (default $CUDA_HOME/bin/nvcc where there is one, otherwise nvcc on PATH).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# The `a` of 90a: wgmma exists on Hopper only.
CUDA_OPTIONS = ("-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeLibrary:
    """Files with a plain C ABI, built to one shared library that ctypes loads, or a program."""

    sources: tuple[str, ...]
    """Paths from the root, all .cpp or all .cu."""
    module: str
    """Dotted place of the library: `a.b._c` is built as a/b/_c.so."""
    instead: str
    """What the code uses when the library is not there."""
    is_program: bool = False
    """A static executable, `a.b._c` built as a/b/_c, rather than a shared library."""

    @property
    def title(self) -> str:
        return f"{' + '.join(self.sources)} {'is' if len(self.sources) == 1 else 'are'}"


NATIVE_LIBRARIES = (
    NativeLibrary(
        sources=("csrc/minhash.cpp",),
        module="megacomposer.data._minhash",
        instead="the numpy implementation (same signatures, slower)",
    ),
    NativeLibrary(
        sources=(
            "csrc/batched_products_sm90.cu",
            "csrc/grouped_products_sm90.cu",
            "csrc/grouped_weights_sm90.cu",
            "csrc/small_newton_schulz_sm90.cu",
        ),
        module="megacomposer.kernels._sm90",
        instead="the Triton and torch kernels (slower on Hopper, the same elsewhere)",
    ),
    NativeLibrary(
        sources=("csrc/sandbox_agent.cpp",),
        module="megacomposer.env.backend._sandbox_agent",
        instead="no sandbox of this machine (they say so, and refuse to start)",
        is_program=True,
    ),
    NativeLibrary(
        sources=("csrc/sandbox_launcher.cpp",),
        module="megacomposer.env.backend._sandbox_launcher",
        instead="other sandboxes than bubblewrap's",
        is_program=True,
    ),
    NativeLibrary(
        sources=("csrc/gvisor_statx.cpp",),
        module="megacomposer.env.backend._gvisor_statx",
        instead="a runsc of 2023 or later (older ones need it)",
    ),
)

# Part of a source distribution through `depends` of the extensions.
HEADERS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.cuh", "*.hpp")
    for path in (ROOT / "csrc").glob(pattern)
)


class BuildNativeLibraries(build_ext):
    """Compiles `NATIVE_LIBRARIES`; a library that cannot be built never blocks the install."""

    def get_ext_filename(self, fullname: str) -> str:
        # No ABI tag: the libraries do not touch the Python C API.
        # setuptools asks with the whole name, and with the last part of it.
        name = fullname.rpartition(".")[2]
        is_program = any(
            item.is_program for item in NATIVE_LIBRARIES if item.module.endswith(f".{name}")
        )
        return os.path.join(*fullname.split(".")) + ("" if is_program else ".so")

    def build_extension(self, ext: Extension) -> None:
        (library,) = (item for item in NATIVE_LIBRARIES if item.module == ext.name)
        target = Path(self.get_ext_fullpath(ext.name))
        # An old library must not outlive a failed build: neither here nor in an editable tree.
        target.unlink(missing_ok=True)
        if self.editable_mode:
            package = ext.name.rpartition(".")[0]
            folder = self.get_finalized_command("build_py").get_package_dir(package)
            (ROOT / folder / target.name).unlink(missing_ok=True)
        reason = _compile(library, target)
        if reason:
            _announce(f"{library.title} not built ({reason}); used instead: {library.instead}")
        else:
            _announce(f"{library.title} built as {library.module}")


def _compile(library: NativeLibrary, target: Path) -> str:
    """Builds `target`; returns why not, or the empty string."""
    if os.environ.get("MEGACOMPOSER_SKIP_CSRC", "0") not in ("", "0"):
        return "MEGACOMPOSER_SKIP_CSRC is set"
    sources = [str(ROOT / source) for source in library.sources]
    is_cuda = sources[0].endswith(".cu")
    compiler = _nvcc() if is_cuda else shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        return f"no compiler {compiler[0]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if library.is_program:
        options = ("-static",)
    else:
        options = ("-shared", *(CUDA_OPTIONS if is_cuda else ("-fPIC",)))
    command = [*compiler, "-O3", "-std=c++17", *options, "-o", str(target), *sources]
    plain_english = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, env=plain_english)
    if result.returncode == 0:
        return ""
    target.unlink(missing_ok=True)
    lines = (result.stderr + result.stdout).splitlines()
    errors = [line for line in lines if re.search("error|fatal|cannot find", line)]
    return f"{compiler[0]} failed: {(errors or ['exit ' + str(result.returncode)])[0].strip()}"


def _nvcc() -> list[str]:
    of_toolkit = Path(os.environ.get("CUDA_HOME") or "/nonexistent") / "bin/nvcc"
    default = str(of_toolkit) if of_toolkit.exists() else "nvcc"
    return shlex.split(os.environ.get("NVCC") or default)


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
        Extension(library.module, [*library.sources], depends=HEADERS, optional=True)
        for library in NATIVE_LIBRARIES
        if all((ROOT / source).exists() for source in library.sources)
    ],
    cmdclass={"build_ext": BuildNativeLibraries},
    zip_safe=False,
)
