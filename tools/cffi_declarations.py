"""Derive from ``include/atlas.h`` everything that has to agree with it.

The header is the authority; nothing of it is written down twice. From its text come

- ``atlas_dispatch.h``: a table of functions, one for each function of the header that the Python
  side implements, and the exported functions, which preset a status, call through it and return;
- ``binding.c``: a cffi extension module whose functions fill that table;
- ``atlas.map``: the linker's version script, with the exported names.

The header keeps to a few forms, which this file checks: ``ATLAS_API type name(arguments);``, enums
with explicit values, typedefs of structs and of function pointers, ``static inline`` initialisers.

Run ``python tools/cffi_declarations.py DIR`` to write the files (a build does).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).resolve().parent.parent / "include" / "atlas.h"
MODULE = "atlas.capi._binding"

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*\n", re.MULTILINE)
_GUARDED = re.compile(r"#ifdef __cplusplus\n.*?#endif\n", re.DOTALL)
_INLINE = re.compile(r"static inline [^{]*\{[^}]*\}\n")
_FUNCTION = re.compile(r"ATLAS_API ([\w ]+?[ *]+)(atlas_\w+)\(([^()]*)\);")
_NAME = re.compile(r"(\w+)$")
_STATUS = re.compile(r"^\s*(ATLAS_(?:OK|ERROR\w*)) = \d+", re.MULTILINE)

# What a call through the table carries besides the function's own arguments.
CALL = """\
typedef struct atlas_call {
    int32_t status;
    uint32_t capacity;
    uint32_t length;
    char *message;
} atlas_call;
"""


@dataclass(frozen=True)
class Function:
    """One exported function."""

    result: str
    name: str
    parameters: str  # as declared, "void" when there are none

    @property
    def dispatched(self) -> bool:
        """Whether Python implements it; what must work without Python is C."""
        return self.result == "atlas_status" and not self.name.startswith("atlas_runtime_")

    @property
    def field(self) -> str:
        """Its name in the table."""
        return self.name.removeprefix("atlas_")

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        if self.parameters == "void":
            return []
        found = [_NAME.search(part.strip()) for part in self.parameters.split(",")]
        assert all(found), self.parameters
        return [match[1] for match in found if match is not None]


# Questions that the library puts to Python on its own account: in the table, not exported.
INTERNAL = (
    Function("atlas_status", "atlas_find_capability", "const char *capability, int32_t *has"),
)


@dataclass(frozen=True)
class Declarations:
    """The header without comments and preprocessor."""

    types: str
    functions: tuple[Function, ...]
    statuses: tuple[str, ...]

    @property
    def dispatched(self) -> list[Function]:
        """What the table holds."""
        return [*(function for function in self.functions if function.dispatched), *INTERNAL]

    @property
    def fingerprint(self) -> str:
        """Equal exactly when types and functions are; library and binding compare it."""
        text = " ".join((self.types + CALL + "".join(map(str, self.functions))).split())
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(header: Path = HEADER) -> Declarations:
    """Parse the header.

    Raises
    ------
    ValueError
        Something has none of the forms that this file knows.
    """
    source = header.read_text()
    text = _COMMENT.sub("", _GUARDED.sub("", source))
    text = _INLINE.sub("", _DIRECTIVE.sub("", text))
    functions = tuple(
        Function(result.strip(), name, " ".join(parameters.split()))
        for result, name, parameters in _FUNCTION.findall(text)
    )
    types = re.sub(r"\n{2,}", "\n", _FUNCTION.sub("", text))
    left = [line for line in types.splitlines() if "ATLAS_API" in line or "static" in line]
    if left or text.count("ATLAS_API") != len(functions):
        raise ValueError(f"{header}: not understood: {left}")
    return Declarations(types, functions, tuple(_STATUS.findall(text)))


def dispatch_header(declared: Declarations) -> str:
    """The function table, and the exported functions that call through it."""
    table, stubs = [], []
    for function in declared.dispatched:
        own = "" if function.parameters == "void" else f", {function.parameters}"
        table.append(f"    void (*{function.field})(atlas_call *call{own});")
        arguments = ", ".join(["&call", *function.names])
        storage = "static " if function in INTERNAL else ""
        stubs.append(
            f"{storage}atlas_status {function.name}({function.parameters}) {{\n"
            "    atlas_call call;\n"
            "    if (!atlas_call_begin(&call)) return call.status;\n"
            f"    atlas_table.{function.field}({arguments});\n"
            "    return atlas_call_end(&call);\n"
            "}\n"
        )
    cases = [f'    case {name}: return "{name}";' for name in declared.statuses]
    return "\n".join(
        [
            "/* Generated from atlas.h; do not edit. */",
            f'#define ATLAS_FINGERPRINT "{declared.fingerprint}"',
            CALL,
            "typedef struct atlas_functions {",
            *table,
            "} atlas_functions;",
            "",
            "#ifdef ATLAS_DEFINE_FUNCTIONS",
            "int atlas_call_begin(atlas_call *call);",
            "atlas_status atlas_call_end(const atlas_call *call);",
            "static atlas_functions atlas_table;",
            *stubs,
            "const char *atlas_status_name(atlas_status status) {",
            "    switch (status) {",
            *cases,
            '    default: return "ATLAS_ERROR_UNKNOWN";',
            "    }",
            "}",
            "#endif",
            "",
        ]
    )


def cffi_declarations(declared: Declarations) -> str:
    """What ``FFI.cdef`` takes: the types, and a Python function for each entry of the table."""
    functions = [
        f"    void python_{f.field}(atlas_call *call"
        + ("" if f.parameters == "void" else f", {f.parameters}")
        + ");"
        for f in declared.dispatched
    ]
    return "\n".join(
        [
            declared.types,
            CALL,
            "int atlas_binding_fill(uintptr_t table, size_t table_size);",
            "const char *atlas_binding_fingerprint(void);",
            'extern "Python+C" {',
            *functions,
            "}",
            "",
        ]
    )


def binding_source(declared: Declarations) -> str:
    """The C prelude of the cffi module: it fills the library's table with Python's functions."""
    prototypes, fields = [], []
    for function in declared.dispatched:
        own = "" if function.parameters == "void" else f", {function.parameters}"
        prototypes.append(f"extern void python_{function.field}(atlas_call *call{own});")
        fields.append(f"        .{function.field} = python_{function.field},")
    return "\n".join(
        [
            '#include "atlas.h"',
            '#include "atlas_dispatch.h"',
            *prototypes,
            "static const char *atlas_binding_fingerprint(void) { return ATLAS_FINGERPRINT; }",
            "static int atlas_binding_fill(uintptr_t table, size_t table_size) {",
            "    const atlas_functions functions = {",
            *fields,
            "    };",
            "    if (table_size != sizeof functions) return 0;",
            "    memcpy((void *)table, &functions, sizeof functions);",
            "    return 1;",
            "}",
            "",
        ]
    )


def version_script(declared: Declarations) -> str:
    """Export the header's functions and nothing else."""
    names = "\n".join(f"        {function.name};" for function in declared.functions)
    return f"ATLAS_LLM_0 {{\n    global:\n{names}\n    local: *;\n}};\n"


def write(folder: Path, header: Path = HEADER) -> Declarations:
    """Write the three files into ``folder``, each only when it changes."""
    from cffi import FFI

    declared = read(header)
    folder.mkdir(parents=True, exist_ok=True)
    _write_if_changed(folder / "atlas_dispatch.h", dispatch_header(declared))
    _write_if_changed(folder / "atlas.map", version_script(declared))
    ffi = FFI()
    ffi.cdef(cffi_declarations(declared))
    ffi.set_source(MODULE, binding_source(declared))
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
        ffi.emit_c_code(str(folder / "binding.c"))
    return declared


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
