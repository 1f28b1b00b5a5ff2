"""Build step of the C library: ``libatlas_llm.so.0``, its cffi binding, and the files around them.

Everything lands in the package, so that a wheel carries it::

    atlas/lib/libatlas_llm.so.0       the library, named as its soname: wheels hold no links
    atlas/lib/libatlas_llm.so         for -latlas_llm: a linker script that names the former
    atlas/lib/pkgconfig/atlas-llm.pc  relocatable
    atlas/lib/cmake/Atlas/            relocatable; the target Atlas::llm
    atlas/capi/_binding.*.so          the cffi module that fills the library's function table
    atlas/include/                    atlas.h and atlas.hpp
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cffi_declarations

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "atlas" / "_native" / "library"
TEMPLATES = ROOT / "packaging"
WARNINGS = ["-Wall", "-Wextra"]


def generated_folder() -> Path:
    """Where derived C files go; outside the sources."""
    return Path("build") / "capi"


def binding() -> Extension:
    """The cffi module. Its source is derived from the header now."""
    folder = generated_folder()
    cffi_declarations.write(ROOT / folder)
    return Extension(
        cffi_declarations.MODULE,
        [str(folder / "binding.c")],
        include_dirs=["include", str(folder)],
        depends=["include/atlas.h"],
        extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"],
    )


def header_constants() -> dict[str, str]:
    """``ATLAS_VERSION`` and ``ATLAS_ABI_VERSION`` of the header."""
    text = (ROOT / "include" / "atlas.h").read_text()
    return {
        name: re.search(rf'^#define ATLAS_{name} "?([\w.]+)"?$', text, re.MULTILINE)[1]  # type: ignore[index]
        for name in ("VERSION", "ABI_VERSION")
    }


def macros() -> list[tuple[str, str]]:
    """What the library knows about the Python that it is built for."""
    config = sysconfig.get_config_var
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    texts = {
        "ATLAS_PYTHON_VERSION": version,
        "ATLAS_BUILD_PREFIX": sys.prefix,
        "ATLAS_BUILD_BASE": sys.base_prefix,
        "ATLAS_LIBPYTHON": shared_library_name(version),
        "ATLAS_LIBPYTHON_DIR": config("LIBDIR") or "",
        "ATLAS_MULTIARCH": config("MULTIARCH") or "x86_64-linux-gnu",
    }
    quoted = [(name, f'"{text}"') for name, text in texts.items()]
    return [("_GNU_SOURCE", "1"), *quoted]


def shared_library_name(version: str) -> str:
    """The file name of libpython; a static Python is built for others of its version, too."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    return name if ".so" in name else f"libpython{version}.so.1.0"


class BuildNative(build_ext):
    """Builds the extensions, as many at a time as there are CPUs, then the C library."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = len(os.sched_getaffinity(0))

    def run(self) -> None:
        super().run()
        package = Path("src" if self.inplace else self.build_lib) / "atlas"
        self._build_library(package / "lib")
        self._write_package_files(package)

    def _build_library(self, folder: Path) -> None:
        constants = header_constants()
        name = f"libatlas_llm.so.{constants['ABI_VERSION']}"
        generated = ROOT / generated_folder()
        compiler: Any = self.compiler
        objects = compiler.compile(
            [str(path.relative_to(ROOT)) for path in sorted(SOURCES.glob("*.c"))],
            output_dir=self.build_temp,
            macros=macros(),
            include_dirs=[str(ROOT / "include"), str(generated), sysconfig.get_path("include")],
            extra_preargs=["-O2", "-std=c11", "-fPIC", "-fvisibility=hidden", *WARNINGS],
        )
        folder.mkdir(parents=True, exist_ok=True)
        link = [
            f"-Wl,-soname,{name}",
            f"-Wl,--version-script={generated / 'atlas.map'}",
            "-Wl,-z,defs,-z,nodelete,-z,relro,-z,now",  # nodelete: Python cannot be unloaded
            "-pthread",
            "-ldl",
        ]
        compiler.link_shared_object(objects, str(folder / name), extra_postargs=link)
        (folder / "libatlas_llm.so").write_text(
            f"/* GNU ld script: the library has its soname's name. */\nINPUT({name})\n"
        )

    def _write_package_files(self, package: Path) -> None:
        values = header_constants()
        for template, target in {
            "atlas-llm.pc.in": "lib/pkgconfig/atlas-llm.pc",
            "AtlasConfig.cmake.in": "lib/cmake/Atlas/AtlasConfig.cmake",
            "AtlasConfigVersion.cmake.in": "lib/cmake/Atlas/AtlasConfigVersion.cmake",
        }.items():
            text = (TEMPLATES / template).read_text()
            for key, value in values.items():
                text = text.replace(f"@ATLAS_{key}@", value)
            path = package / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if self.inplace:  # a wheel has them as the package atlas.include
            (package / "include").mkdir(exist_ok=True)
            for header in (ROOT / "include").glob("atlas.h*"):
                shutil.copy(header, package / "include")
