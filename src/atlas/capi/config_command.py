"""``atlas-config``: where the C library is, for compilers and build systems."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

import atlas


def package_folder() -> Path:
    """The installed package; ``lib`` and ``include`` lie in it."""
    return Path(atlas.__file__).resolve().parent


def values(package: Path) -> dict[str, str]:
    """What each option prints."""
    include, library = package / "include", package / "lib"
    return {
        "cflags": f"-I{shlex.quote(str(include))}",
        "libs": f"-L{shlex.quote(str(library))} -latlas_llm "
        + shlex.quote(f"-Wl,-rpath,{library}"),
        "includedir": str(include),
        "libdir": str(library),
        "pkgconfigdir": str(library / "pkgconfig"),
        "cmakedir": str(library / "cmake"),
        "version": atlas.__version__,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cflags", "asked", flag_value="cflags", multiple=True, help="Compiler flags.")
@click.option("--libs", "asked", flag_value="libs", multiple=True, help="Linker flags.")
@click.option("--includedir", "asked", flag_value="includedir", multiple=True, help="Headers.")
@click.option("--libdir", "asked", flag_value="libdir", multiple=True, help="Libraries.")
@click.option(
    "--pkgconfigdir", "asked", flag_value="pkgconfigdir", multiple=True, help="For PKG_CONFIG_PATH."
)
@click.option(
    "--cmakedir", "asked", flag_value="cmakedir", multiple=True, help="For CMAKE_PREFIX_PATH."
)
@click.option("--version", "asked", flag_value="version", multiple=True, help="The version.")
def main(asked: tuple[str, ...]) -> None:
    """Print what building against libatlas_llm.so takes, in the order asked."""
    if not asked:
        raise click.UsageError("nothing asked; see --help")
    package = package_folder()
    if not (package / "lib" / "libatlas_llm.so").exists():
        raise click.ClickException(f"{package} has no C library; reinstall atlas-llm")
    found = values(package)
    click.echo(" ".join(found[name] for name in asked))
