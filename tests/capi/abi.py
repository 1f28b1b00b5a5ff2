"""The ABI as text: exported symbols, functions, struct layouts, constants.

``python -m tests.capi.abi`` writes the checked-in list; do that only to make a change on purpose,
and raise ATLAS_ABI_VERSION where something was removed or has changed its meaning.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from atlas.capi._binding import ffi, lib
from tests.capi.programs import ROOT, library

LIST = Path(__file__).with_name("abi.txt")

sys.path.insert(0, str(ROOT / "tools"))
import cffi_declarations  # noqa: E402

HEADER = ROOT / "include" / "atlas.h"


def exported_symbols() -> list[str]:
    """Names that the library defines for others."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library())]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted(line.split()[0].partition("@")[0] for line in output.splitlines())


def layout(kind: Any) -> list[str]:
    """A struct's size and members, as the C compiler has them."""
    lines = [f"{kind.cname}: {ffi.sizeof(kind)} bytes"]
    for name, member in kind.fields:
        lines.append(f"    {member.offset}: {member.type.cname} {name}")
    return lines


def describe() -> str:
    """The whole list."""
    declared = cffi_declarations.read(HEADER)
    lines = [f"soname libatlas_llm.so.{library().suffix[1:]}", ""]
    lines += [f"symbol {name}" for name in exported_symbols()] + [""]
    lines += [f"{f.result} {f.name}({f.parameters})" for f in declared.functions] + [""]
    opaque = {"atlas_call", *re.findall(r"typedef struct (\w+) \1;", declared.types)}
    typedefs, _, _ = ffi.list_types()
    for name in sorted(typedefs):
        kind = ffi.typeof(name)
        if kind.kind == "struct" and name not in opaque:
            lines += layout(kind)
        if kind.kind in ("function", "pointer"):
            lines.append(f"callback {name}: {kind.cname}")
    constants = {name: getattr(lib, name) for name in dir(lib) if name.startswith("ATLAS_")}
    lines += ["", *(f"{name} = {value}" for name, value in sorted(constants.items()))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LIST.write_text(describe())
