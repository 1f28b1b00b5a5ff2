"""``atlas bundle``: a folder with everything that a C program needs, for machines without pip.

The folder can be moved. It is a Python home, so that the library in it finds all else from its own
place::

    include/                 atlas.h, atlas.hpp
    lib/libatlas_llm.so*     with lib/pkgconfig and lib/cmake
    lib/libpython3.Y.so.1.0  lib/python3.Y/ (standard library, site-packages)
    lib/atlas-system/        libraries of this system that extension modules need, glibc apart
    share/atlas/kernels/     compiled for this kind of CPU; others compile when they load a model
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import atlas
from atlas.errors import CapabilityError, InvalidArgumentError

# Of the standard library: what no library uses, and what belongs to installing.
_LEFT_OUT = {
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tkinter"),
    *("turtledemo", "venv", "__pycache__"),
}
_LEFT_OUT_MODULES = re.compile(
    r"(_tkinter|_test\w*|_ctypes_test|_xxtestfuzz|xxlimited\w*|readline|_curses\w*|_g?dbm|nis)\."
)
_NOT_NEEDED = {"huggingface-hub"}  # tokenizers downloads with it; Atlas does not
_GLIBC = re.compile(
    r"(ld-linux[\w-]*|lib(c|m|dl|rt|pthread|util|resolv|anl|mvec|thread_db|nss_\w+))\.so"
)
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*")


def bundle(folder: str | os.PathLike[str], *, with_model: bool = False) -> Path:
    """Write a bundle.

    Parameters
    ----------
    folder : str or path
        A new or empty folder.
    with_model : bool
        Put the package's own model, atlas-tiny, into it (12 MB).

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    InvalidArgumentError
        The folder holds something.
    CapabilityError
        This Python has no shared library, or Atlas is not installed whole.
    """
    out = Path(folder).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgumentError(f"{out} is no empty folder; allowed: a new or an empty one")
    shared, package = python_library(), Path(atlas.__file__).resolve().parent
    if not (package / "lib").is_dir():
        raise CapabilityError(f"{package} has no C library; allowed: an installed atlas-llm")
    if importlib.util.find_spec("atlas_kernels") is None:
        raise CapabilityError(
            f"{package} has no atlas_kernels beside it; allowed: an installed atlas-llm"
        )
    is_new = not out.exists()
    try:
        _write(out, shared, package, with_model)
    except BaseException:  # half a bundle would pass for one, and stand in the way of the next
        for part in out.glob("*"):
            shutil.rmtree(part)
        if is_new and out.exists():
            out.rmdir()
        raise
    return out


def _write(out: Path, shared: Path, package: Path, with_model: bool) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = out / "lib" / version / "site-packages"
    _copy_standard_library(out / "lib" / version)
    shutil.copy(shared, out / "lib" / shared.name)
    _copy_packages(package, site, with_model)
    _copy_development_files(package, out)
    copy_kernels(out / "share" / "atlas" / "kernels")
    _copy_system_libraries(out)


def python_library() -> Path:
    """The shared library of the running Python."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    path = Path(sysconfig.get_config_var("LIBDIR") or "", name)
    if ".so" not in name or not path.exists():
        raise CapabilityError(
            f"Python {sys.base_prefix} was built without a shared library; "
            "allowed: one built with --enable-shared"
        )
    return path


def _copy_standard_library(target: Path) -> None:
    source = Path(sysconfig.get_path("stdlib"))

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name in _LEFT_OUT or name.startswith("config-") or _LEFT_OUT_MODULES.match(name)
        ]

    shutil.copytree(source, target, ignore=left_out)
    (target / "site-packages").mkdir()


def distributions() -> Iterator[importlib.metadata.Distribution]:
    """What atlas-llm needs, and what that needs, without extras."""
    pending, seen = ["atlas-llm"], set(_NOT_NEEDED)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or version of Python
        if name != "atlas-llm":
            yield found
        for requirement in found.requires or ():
            match = _REQUIREMENT.match(requirement)
            if match and "extra ==" not in requirement:
                pending.append(re.sub(r"[-_.]+", "-", match[0]).lower())


def _copy_packages(package: Path, site: Path, with_model: bool) -> None:
    import atlas_kernels

    left_out = ("__pycache__", "*.c", "*.pyx", "*.html")
    ignore = shutil.ignore_patterns(*left_out)
    data = () if with_model else ("data",)
    shutil.copytree(package, site / "atlas", ignore=shutil.ignore_patterns(*left_out, *data))
    assert atlas_kernels.__file__ is not None
    shutil.copytree(Path(atlas_kernels.__file__).parent, site / "atlas_kernels", ignore=ignore)
    for distribution in distributions():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            outside = file.is_absolute() or ".." in file.parts
            if outside or "__pycache__" in file.parts or not source.is_file():
                continue  # scripts, byte code
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def _copy_development_files(package: Path, out: Path) -> None:
    for path in (package / "lib").iterdir():
        if path.is_dir():
            shutil.copytree(path, out / "lib" / path.name)
        else:
            shutil.copy(path, out / "lib" / path.name)
    include = package / "include"
    if not (include / "atlas.h").exists():  # an editable install has them elsewhere
        from importlib.resources import files

        include = Path(str(files("atlas.include")))
    (out / "include").mkdir()
    for header in include.glob("atlas.h*"):
        shutil.copy(header, out / "include")


def copy_kernels(target: Path) -> int:
    """Compile every CPU kernel that is not cached and copy all; returns how many."""
    from atlas.backends.cpu import bodies, code_cache
    from atlas.backends.cpu.compiler import BodyCompiler

    for module in pkgutil.iter_modules(bodies.__path__):
        importlib.import_module(f"{bodies.__name__}.{module.name}")
    compiler = BodyCompiler()
    for name in bodies.BODIES:
        compiler.address(name)
        source = code_cache.entry_path(name)
        copy = target / source.relative_to(code_cache.cache_folder())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return len(bodies.BODIES)


def use_bundled_kernels() -> None:
    """Inside a bundle: read its kernels, if they fit this CPU and nothing else was chosen."""
    folder = Path(sys.prefix) / "share" / "atlas" / "kernels"
    if "ATLAS_CACHE_DIR" in os.environ or not folder.is_dir():
        return
    from atlas.backends.cpu.code_cache import cache_key

    if (folder / "cpu" / cache_key()).is_dir():
        os.environ["ATLAS_CACHE_DIR"] = str(folder)


# -- libraries of the system ------------------------------------------------------------------


def _copy_system_libraries(out: Path) -> None:
    """In the order of dependence, which their names keep."""
    ours = [path for path in (out / "lib").rglob("*.so*") if path.is_file() and _is_elf(path)]
    order: list[Path] = []
    for library in ours:
        _visit(library, order, out)
    target = out / "lib" / "atlas-system"
    target.mkdir()
    for index, library in enumerate(order):
        shutil.copy(library, target / f"{index:03}-{library.name}")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _visit(library: Path, order: list[Path], out: Path) -> None:
    for needed in _needed(library):
        if out not in needed.parents and needed not in order and not _in_bundle(needed, out):
            _visit(needed, order, out)
            if needed not in order:
                order.append(needed)


def _in_bundle(library: Path, out: Path) -> bool:
    return (out / "lib" / library.name).exists()


def _needed(library: Path) -> Iterable[Path]:
    """What the dynamic linker would load for it, glibc apart."""
    output = subprocess.run(["ldd", library], capture_output=True, text=True, check=False).stdout
    for line in output.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if arrow and rest.startswith("/") and not _GLIBC.match(name):
            # Named as asked for: the soname, not the file behind the link.
            path = Path(rest.rpartition(" (")[0])
            yield path.parent.resolve() / path.name
