"""Python → LLVM IR → PTX → cubin, when a kernel is first wanted or ahead of time. Needs no GPU."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import marshal
import multiprocessing
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from atlas_kernels.cache import read_entry, source_hash, write_entry
from atlas_kernels.manifest import MANIFEST_FORMAT, CompiledKernel, KernelInfo, manifest_text
from atlas_kernels.registry import (
    KERNELS,
    Architecture,
    Body,
    Kernel,
    argument_names,
    load_table,
)


class KernelBuildError(RuntimeError):
    """A kernel does not compile, or a file of compiled kernels is not what it should be."""


_LOCK = threading.Lock()
_SIZES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
# Numba's part of the work is the same for every architecture.
_IR: weakref.WeakKeyDictionary[Kernel, list[str]] = weakref.WeakKeyDictionary()


def load(
    name: str, arch: str, *, on_compile: Callable[[str], None] | None = None
) -> CompiledKernel:
    """A kernel of this package from the disk cache, or compiled and put there.

    Parameters
    ----------
    name : str
        As in ``registry.KERNELS``.
    arch : str
        Such as ``sm_90a``; ``Architecture.of_device`` names a device's.
    on_compile : callable, optional
        Called with the name before a kernel is compiled, for a progress display.
    """
    if (compiled := _read(name, arch)) is not None:
        return compiled
    if on_compile is not None:
        on_compile(name)
    declared = find(name)
    compiled = compile_kernel(declared, arch)
    if declared.is_builtin:
        write_entry(compiled)
    return compiled


def find(name: str) -> Kernel:
    """The declaration of a kernel."""
    table = load_table()
    if name not in table:
        raise KernelBuildError(f"no kernel is called {name}; there are {', '.join(sorted(table))}")
    return table[name]


def compile_kernel(declared: Kernel, arch: str) -> CompiledKernel:
    """Compile one kernel for an architecture.

    Raises
    ------
    KernelBuildError
        With the compiler's words, when it does not compile, or not for this architecture.
    """
    target = Architecture.parse(arch)
    if not target.runs(declared.needs):
        raise KernelBuildError(f"kernel {declared.name} needs {declared.needs}, not {arch}")
    body = declared.make()
    names = argument_names(body, declared)
    with _LOCK:
        code = compile_body(body, declared, target)
        cubin, log = link(code, arch, declared)
    sizes = _SIZES.search(log)
    if sizes is None:
        raise KernelBuildError(f"{declared.name}: no register count in the linker's log:\n{log}")
    stack, stores, loads, registers, rest = sizes.groups()
    static = re.search(r"(\d+) bytes smem", rest)
    info = KernelInfo(
        name=declared.name,
        entry=declared.entry,
        op=declared.op,
        variant=declared.variant,
        arch=arch,
        arguments=tuple(zip(names, declared.kinds, strict=True)),
        threads=declared.threads,
        min_blocks=declared.min_blocks,
        cluster=declared.cluster,
        static_shared_bytes=int(static[1]) if static else 0,
        dynamic_shared_bytes=declared.shared_bytes,
        registers=int(registers),
        spill_bytes=int(stores) + int(loads),
        stack_bytes=int(stack),
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(r"warn|C75", line)),
        source_hash=_source_hash(declared, body),
    )
    return CompiledKernel(info, cubin)


def compile_body(body: Body, declared: Kernel, target: Architecture) -> bytes:
    """The PTX of a kernel, or its LTO-IR if it is declared so."""
    from atlas_kernels._cuda import compile_ir, llvm_ir
    from atlas_kernels.ptx import portable

    try:
        modules = _IR.get(declared)
        if modules is None:
            bounds = (declared.threads, declared.min_blocks)
            modules = llvm_ir(body, declared.kinds, declared.entry, bounds)
            _IR[declared] = modules
        modules = [portable(module, target.capability) for module in modules]
        return compile_ir(modules, f"compute_{target.number}", lto=declared.lto)
    except Exception as error:  # Numba and libNVVM have many; the words are theirs
        raise KernelBuildError(f"kernel {declared.name} for {target}: {error}") from error


def link(code: bytes, arch: str, declared: Kernel) -> tuple[bytes, str]:
    """PTX or LTO-IR to a cubin, and the assembler's report."""
    from cuda.bindings import nvjitlink

    # Of a result in nvJitLink's own cache the log would tell no spills.
    options = [f"-arch={arch}", "-O3", "-verbose", "-no-cache"] + ["-lto"] * declared.lto
    kind = nvjitlink.InputType.LTOIR if declared.lto else nvjitlink.InputType.PTX
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, kind, code, len(code), declared.entry)
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    except nvjitlink.nvJitLinkError as error:
        words = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, words)
        text = words.rstrip(b"\0").decode(errors="replace")
        raise KernelBuildError(f"kernel {declared.name} for {arch}: {error}\n{text}") from error
    finally:
        nvjitlink.destroy(linker)
    return bytes(cubin), log.rstrip(b"\0").decode(errors="replace")


def names_for(arch: str) -> list[str]:
    """Names of the kernels of this package that run on an architecture, sorted."""
    target = Architecture.parse(arch)
    table = load_table()
    return sorted(k.name for k in table.values() if k.is_builtin and target.runs(k.needs))


def load_all(
    names: Iterable[str],
    arch: str,
    *,
    jobs: int = 1,
    on_compile: Callable[[str], None] | None = None,
) -> dict[str, CompiledKernel]:
    """Several kernels as ``load`` gives them, missing ones compiled by up to ``jobs`` processes."""
    names = list(names)
    found = {name: _read(name, arch) for name in names}
    missing = [name for name in names if found[name] is None]
    jobs = min(jobs, len(missing))
    if jobs > 1 and all(find(name).is_builtin for name in missing):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
            pending = {pool.submit(load, name, arch): name for name in missing}
            for future in concurrent.futures.as_completed(pending):
                if on_compile is not None:
                    on_compile(pending[future])
                found[pending[future]] = future.result()
    else:
        for name in missing:
            found[name] = load(name, arch, on_compile=on_compile)
    return {name: compiled for name, compiled in found.items() if compiled is not None}


def kernel_table(arch: str, *, jobs: int = 1) -> list[KernelInfo]:
    """Every kernel of this package on an architecture, with registers, spills, shared memory."""
    return [compiled.info for compiled in load_all(names_for(arch), arch, jobs=jobs).values()]


def build_all(
    arch: str,
    out: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    jobs: int = 1,
    on_compile: Callable[[str], None] | None = None,
) -> list[KernelInfo]:
    """Compile ahead of time: one cubin a kernel, and ``manifest.json``, in the folder ``out``.

    Parameters
    ----------
    arch : str
        Such as ``sm_90a``.
    out : path
        Created if need be; the manifest is written last.
    names : iterable of str, optional
        All that run on the architecture if absent.
    jobs : int
        Processes that compile.

    Returns
    -------
    list of KernelInfo
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = names_for(arch) if names is None else names
    built = load_all(chosen, arch, jobs=jobs, on_compile=on_compile)
    digests = {}
    for name, compiled in built.items():
        (folder / f"{name}.cubin").write_bytes(compiled.cubin)
        digests[name] = hashlib.sha256(compiled.cubin).hexdigest()
    infos = [compiled.info for compiled in built.values()]
    (folder / "manifest.json").write_text(manifest_text(infos, digests))
    return infos


def read_folder(folder: str | os.PathLike[str]) -> dict[str, CompiledKernel]:
    """Kernels that ``build_all`` wrote, by name.

    Raises
    ------
    KernelBuildError
        The manifest or a file is missing, damaged, or made from other sources.
    """
    path = Path(folder) / "manifest.json"
    kernels = {}
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != MANIFEST_FORMAT:
            raise KernelBuildError(f"{path}: format {manifest['format']}, not {MANIFEST_FORMAT}")
        for fields in manifest["kernels"]:
            cubin = (path.parent / fields.pop("file")).read_bytes()
            if hashlib.sha256(cubin).hexdigest() != fields.pop("sha256"):
                raise KernelBuildError(f"{path.parent}: {fields['name']}.cubin is damaged")
            info = KernelInfo.from_json(fields)
            if info.source_hash != source_hash():
                raise KernelBuildError(f"{path.parent}: {info.name} was built from other sources")
            kernels[info.name] = CompiledKernel(info, cubin)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KernelBuildError(f"{path}: {error}") from error
    return kernels


def _read(name: str, arch: str) -> CompiledKernel | None:
    """A kernel from the disk cache, which knows nothing of those declared at run time."""
    declared = KERNELS.get(name)
    if declared is not None and not declared.is_builtin:
        return None
    return read_entry(name, arch)


def _source_hash(declared: Kernel, body: Body) -> str:
    if declared.is_builtin:
        return source_hash()
    return hashlib.sha256(marshal.dumps(body.__code__)).hexdigest()[:32]
