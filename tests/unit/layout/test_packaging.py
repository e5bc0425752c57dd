"""What an install contains, and that it never claims the top-level name `kernels`."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_NATIVE = "megacomposer/data/_minhash.so"
_CUDA = "megacomposer/kernels/_sm90.so"


def run_python(code: str, *, pythonpath: str | None) -> subprocess.CompletedProcess[str]:
    """`code` in a new interpreter that runs in the root, as a launcher would start it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONSAFEPATH"] = "1"
    if pythonpath is not None:
        environment["PYTHONPATH"] = pythonpath
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="session")
def copy_tree(repository_files: list[Path]):
    """Copies what an install is made from to a new folder, and returns it."""

    def copy(source: Path) -> Path:
        for file in repository_files:
            if file.parts[0] in ("tests", "docs", "scripts"):
                continue
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, source / file, follow_symlinks=False)
        return source

    return copy


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory, copy_tree):
    """Builds the wheel from a copy of the tree, with more environment variables; its path."""

    def build(edit=lambda source: None, **variables: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("wheel")
        source = copy_tree(folder / "source")
        edit(source)
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps"]
        command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
        environment = {**os.environ, "NVCC": "no-such-nvcc", **variables}
        result = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert result.returncode == 0, result.stdout
        (wheel,) = folder.glob("*.whl")
        return wheel, result.stdout

    return build


@pytest.fixture(scope="session")
def wheel_files(build_wheel) -> list[str]:
    wheel, _ = build_wheel(MEGACOMPOSER_SKIP_CSRC="1")
    return zipfile.ZipFile(wheel).namelist()


def test_top_level_kernels_is_not_ours() -> None:
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec and spec.origin)"
    found = run_python(code, pythonpath=None).stdout.strip()
    assert found == "None" or ROOT not in Path(found).parents


def test_megacomposer_kernels_is_the_folder_at_the_root() -> None:
    code = "import megacomposer.kernels as k; print(k.__file__)"
    result = run_python(code, pythonpath=str(ROOT))
    assert Path(result.stdout.strip()).resolve() == ROOT / "kernels" / "__init__.py"


def test_kernels_symlink_is_relative_and_part_of_the_repository(
    repository_files: list[Path],
) -> None:
    link = Path("megacomposer/kernels")
    assert link in repository_files
    assert os.readlink(ROOT / link) == "../kernels"


def test_importing_the_package_needs_neither_torch_nor_triton() -> None:
    code = "import sys, megacomposer; print({'torch', 'triton', 'megatron'} & set(sys.modules))"
    assert run_python(code, pythonpath=str(ROOT)).stdout == "set()\n"


def test_configuration_of_every_room_imports_without_torch() -> None:
    rooms = sorted(path.parent.name for path in ROOT.glob("megacomposer/*/config.py"))
    imports = ", ".join(f"megacomposer.{room}.config" for room in rooms)
    code = f"import sys, {imports}; print({{'torch', 'triton', 'megatron'}} & set(sys.modules))"
    result = run_python(code, pythonpath=str(ROOT))
    assert result.stdout == "set()\n", result.stderr


def test_wheel_has_every_module_once_and_kernels_only_inside_the_package(
    wheel_files: list[str], repository_files: list[Path]
) -> None:
    ours = [str(f) for f in repository_files if f.suffix == ".py" and f.parts[0] == "megacomposer"]
    kernels = [f for f in repository_files if f.suffix == ".py" and f.parts[0] == "kernels"]
    expected = ours + [f"megacomposer/{file}" for file in kernels]
    assert "megacomposer/kernels/__init__.py" in expected
    assert sorted(f for f in wheel_files if f.endswith(".py")) == sorted(expected)
    assert {f.split("/")[0] for f in wheel_files if ".dist-info/" not in f} == {"megacomposer"}


def test_wheel_has_the_measured_table_of_the_cost_model(wheel_files: list[str]) -> None:
    assert "megacomposer/optim/newton_schulz_h200.json" in wheel_files


def test_skipped_native_build_still_gives_a_wheel_that_says_what_is_used_instead(
    build_wheel,
) -> None:
    def add_source(source: Path) -> None:
        (source / "csrc").mkdir(exist_ok=True)
        (source / "csrc/minhash.cpp").touch()

    wheel, output = build_wheel(add_source, CXX="no-such-compiler")
    assert _NATIVE not in zipfile.ZipFile(wheel).namelist()
    assert re.search(r"minhash.cpp is not built \(no compiler no-such-compiler\); used", output)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_native_library_is_built_into_the_wheel_and_loads(build_wheel, tmp_path: Path) -> None:
    def add_function(source: Path) -> None:
        (source / "csrc").mkdir(exist_ok=True)
        with (source / "csrc/minhash.cpp").open("a") as file:
            file.write('\nextern "C" int layout_test_answer() { return 42; }\n')

    wheel, output = build_wheel(add_function, MEGACOMPOSER_SKIP_CSRC="0")
    assert "csrc/minhash.cpp is built" in output
    library = zipfile.ZipFile(wheel).extract(_NATIVE, tmp_path)
    assert ctypes.CDLL(library).layout_test_answer() == 42


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_sandbox_agent_is_installed_as_a_program_that_runs(build_wheel, tmp_path: Path) -> None:
    wheel, output = build_wheel(MEGACOMPOSER_SKIP_CSRC="0")
    assert "csrc/sandbox_agent.cpp is built as megacomposer.env.backend._sandbox_agent" in output
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    program = tmp_path / "megacomposer/env/backend/_sandbox_agent"
    result = subprocess.run(
        [program], env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    headers = subprocess.run(["readelf", "-l", program], capture_output=True, text=True).stdout
    assert "LOAD" in headers
    assert "INTERP" not in headers  # it must run where there are no libraries


def test_broken_native_source_does_not_block_the_install(build_wheel) -> None:
    def break_source(source: Path) -> None:
        (source / "csrc").mkdir(exist_ok=True)
        (source / "csrc/minhash.cpp").write_text("this is not C++\n")

    wheel, output = build_wheel(break_source)
    assert _NATIVE not in zipfile.ZipFile(wheel).namelist()
    assert "is not built (" in output


def write_script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# Writes its arguments where the compiler would write the library.
_FAKE_NVCC = 'all="$*"; while [ "$1" != -o ]; do shift; done; echo "$all" >"$2"'


@pytest.mark.parametrize("named_by", ["NVCC", "CUDA_HOME", "PATH"])
def test_cuda_library_is_built_from_all_its_sources_into_the_wheel(
    build_wheel, tmp_path: Path, named_by: str
) -> None:
    script = write_script(tmp_path / "bin/nvcc", _FAKE_NVCC)
    variables = {
        "NVCC": {"NVCC": f"{script} -lineinfo"},
        "CUDA_HOME": {"NVCC": "", "CUDA_HOME": str(tmp_path)},
        "PATH": {"NVCC": "", "CUDA_HOME": "", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    }[named_by]
    wheel, output = build_wheel(CXX="no-such-compiler", **variables)
    command = zipfile.ZipFile(wheel).read(_CUDA).decode().split()
    sources = [f"csrc/{file.name}" for file in sorted((ROOT / "csrc").glob("*.cu"))]
    assert [f"csrc/{Path(word).name}" for word in command if word.endswith(".cu")] == sources
    assert {"-shared", "-gencode=arch=compute_90a,code=sm_90a"} < set(command)
    assert ("-lineinfo" in command) == (named_by == "NVCC")
    assert f"{' + '.join(sources)} are built as megacomposer.kernels._sm90" in output


def test_missing_or_failing_nvcc_does_not_block_the_install(build_wheel, tmp_path: Path) -> None:
    wheel, output = build_wheel(NVCC="no-such-nvcc")
    assert _CUDA not in zipfile.ZipFile(wheel).namelist()
    reason = re.escape(
        "not built (no compiler no-such-nvcc); used instead: the Triton and torch kernels"
    )
    assert re.search(rf"small_newton_schulz_sm90\.cu are {reason}", output)
    # the linker fails after it has opened its output
    fail = f'{_FAKE_NVCC}; echo "ld: cannot find -lcudart_static" >&2; exit 1'
    script = write_script(tmp_path / "nvcc", fail)
    wheel, output = build_wheel(NVCC=script)
    assert _CUDA not in zipfile.ZipFile(wheel).namelist()
    assert "failed: ld: cannot find -lcudart_static)" in output


def test_source_distribution_has_all_that_the_native_builds_read(copy_tree, tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source")
    code = f"from setuptools import build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    with tarfile.open(tmp_path / result.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    natives = {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").iterdir()}
    assert any(name.endswith(".cuh") for name in natives)
    assert natives <= names


def test_apex_is_in_no_dependency_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^\w.-]", item)[0].lower() for items in lists for item in items}
    assert "megatron-core" in names
    assert "apex" not in names


def test_apex_is_never_installed_by_a_script_or_recommended(repository_files: list[Path]) -> None:
    command = re.compile(r"pip3? install [^\n]*\bapex\b")
    offenders = [
        str(file)
        for file in repository_files
        if file.suffix in (".sh", ".sbatch", ".toml", ".cfg") or file.name == "run"
        if command.search((ROOT / file).read_text())
    ]
    assert offenders == []
