"""The Cython extensions, the C library, and the packages outside src/; see pyproject.toml."""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from build_library import BuildNative, binding

NATIVE = [
    Extension(
        f"atlas._native.{source.stem}",
        [str(source)],
        extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden"],
        extra_link_args=["-pthread"],
    )
    for source in sorted(Path("src/atlas/_native").glob("*.pyx"))
]

setup(
    packages=[*find_packages("src"), "atlas_kernels", "atlas.include"],
    package_dir={"": "src", "atlas_kernels": "kernels", "atlas.include": "include"},
    include_package_data=False,  # MANIFEST.in is for the sdist
    package_data={
        "atlas": ["py.typed"],
        "atlas._native": ["*.pxd", "*.pyi"],
        "atlas.include": ["*.h", "*.hpp"],
    },
    ext_modules=[
        *cythonize(
            NATIVE,
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": False,
            },
            nthreads=len(os.sched_getaffinity(0)),
        ),
        binding(),
    ],
    cmdclass={"build_ext": BuildNative},
)
