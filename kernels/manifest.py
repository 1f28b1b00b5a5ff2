"""What is known of a compiled kernel, as a record and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

MANIFEST_FORMAT = 1


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A compiled kernel: how to launch it, and what the assembler says of it.

    Attributes
    ----------
    name, entry, op, variant : str
        ``rmsnorm_bf16``, ``atlas_rmsnorm_bf16``, ``rmsnorm``, ``bf16``.
    arch : str
        ``sm_90a``.
    arguments : tuple of (name, kind)
        In order; kinds as in ``registry.KINDS``.
    threads, min_blocks, cluster : int
        Launch bounds and cluster size.
    static_shared_bytes, dynamic_shared_bytes : int
        A launch asks for the dynamic ones.
    registers, spill_bytes, stack_bytes : int
        Per thread; spills are stores and loads together.
    warnings : tuple of str
        The assembler's, such as a serialised ``wgmma``; empty for every kernel of this package.
    source_hash : str
        Of the sources that it was compiled from.
    """

    name: str
    entry: str
    op: str
    variant: str
    arch: str
    arguments: tuple[tuple[str, str], ...]
    threads: int
    min_blocks: int
    cluster: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    source_hash: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> KernelInfo:
        """The reverse of ``to_json``; a wrong or missing field is a TypeError or KeyError."""
        fields = dict(fields)
        fields["arguments"] = tuple((str(name), str(kind)) for name, kind in fields["arguments"])
        fields["warnings"] = tuple(fields["warnings"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel's record and its machine code (an ELF image that the driver loads)."""

    info: KernelInfo
    cubin: bytes


def manifest_text(infos: list[KernelInfo], digests: dict[str, str]) -> str:
    """The text of ``manifest.json``: every kernel with its file and the file's SHA-256."""
    kernels = [
        info.to_json() | {"file": f"{info.name}.cubin", "sha256": digests[info.name]}
        for info in infos
    ]
    return json.dumps({"format": MANIFEST_FORMAT, "kernels": kernels}, indent=1) + "\n"
