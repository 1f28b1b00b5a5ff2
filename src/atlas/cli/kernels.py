"""``atlas kernels``: the CUDA kernels, listed with what they take, and compiled ahead of time."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from atlas.cli.options import debug_option
from atlas.errors import KernelError

_DEFAULT_ARCH = "sm_90a"
_arch_option = click.option(
    "--arch",
    default=_DEFAULT_ARCH,
    show_default=True,
    help="What to compile for: sm_80, sm_90a, sm_100, sm_120, …",
)
_jobs_option = click.option(
    "--jobs", type=click.IntRange(1), help="Processes that compile (default: the CPUs available)."
)


@click.group("kernels", invoke_without_command=True)
@click.pass_context
def kernels(context: click.Context) -> None:
    """CUDA kernels: list them, or compile them ahead of time. Needs no GPU."""
    # Click would raise the help as a usage error, which `atlas` prints as one line.
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@kernels.command("list")
@_arch_option
@_jobs_option
@click.argument("names", nargs=-1)
@debug_option
def list_kernels(arch: str, jobs: int | None, names: tuple[str, ...]) -> None:
    """Registers, spills and shared memory of each kernel; NAMES begin as given.

    Kernels that are not in the cache are compiled first.
    """
    build = _build()
    chosen = _chosen(build, arch, names)
    infos = [c.info for c in _compiled(build, chosen, arch, jobs).values()]
    width = max((len(info.name) for info in infos), default=4)
    click.echo(f"{'kernel':{width}}  threads  registers  spills  static  dynamic shared  cluster")
    for info in infos:
        click.echo(
            f"{info.name:{width}}  {info.threads:7}  {info.registers:9}  {info.spill_bytes:6}"
            f"  {info.static_shared_bytes:6}  {info.dynamic_shared_bytes:14}  {info.cluster:7}"
        )


@kernels.command("build")
@_arch_option
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the kernels."
)
@_jobs_option
@click.argument("names", nargs=-1)
@debug_option
def build_kernels(arch: str, out: str, jobs: int | None, names: tuple[str, ...]) -> None:
    """Compile kernels into a folder with a manifest; NAMES begin as given (default: all).

    An engine uses the folder that $ATLAS_CUDA_KERNELS names.
    """
    build = _build()
    started = time.perf_counter()
    chosen = _chosen(build, arch, names)
    _compiled(build, chosen, arch, jobs)
    infos = build.build_all(arch, out, names=chosen)
    spills = [info.name for info in infos if info.spill_bytes]
    click.echo(
        f"{len(infos)} kernels for {arch} in {out}, {time.perf_counter() - started:.0f} s"
        + (f"; spilling: {', '.join(spills)}" if spills else "")
    )


def _build() -> Any:
    """The compiler's module; a KernelError says what is missing."""
    try:
        from atlas_kernels import build
        from atlas_kernels.registry import load_table

        load_table()
    except ImportError as error:
        raise KernelError(f"{error}: pip install 'atlas-llm[cuda]'") from error
    return build


def _chosen(build: Any, arch: str, prefixes: tuple[str, ...]) -> list[str]:
    try:
        every = build.names_for(arch)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in every):
            raise click.BadParameter(f"no kernel's name begins with {prefix!r}", param_hint="NAMES")
    return [name for name in every if not prefixes or name.startswith(prefixes)]


def _compiled(build: Any, names: list[str], arch: str, jobs: int | None) -> dict[str, Any]:
    count = len(os.sched_getaffinity(0)) if jobs is None else jobs
    try:
        found: dict[str, Any] = build.load_all(
            names,
            arch,
            jobs=count,
            on_compile=lambda name: click.echo(f"compiled {name}", err=True),
        )
    except build.KernelBuildError as error:
        raise KernelError(str(error)) from error
    return found


def _report(name: str) -> None:
    click.echo(f"compiled {name}", err=True)
