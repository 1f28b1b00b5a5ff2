"""The Python side of ``libatlas_llm.so``: what the functions of ``atlas.h`` do.

The library is C. It starts Python or finds one running, imports this package, and has the cffi
module ``_binding`` fill a table with one Python function for each function of the header. Each of
them gets the call's status, preset to a failure, and turns it into success as its last act; hence
an exception, an unattached function or a broken installation can never look like success.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

# Missing later, in the middle of a call, they would be harder to understand.
_REQUIRED = (
    "cffi",
    "_cffi_backend",
    "jinja2",
    "llvmlite",
    "numba",
    "numpy",
    "safetensors",
    "tokenizers",
)
_MODULES = (
    *("capabilities", "engine", "events", "forwards", "log", "logits"),
    *("options", "requests", "samplers", "sequences", "text", "translations"),
)


def attach(table: int, table_size: int, fingerprint: str, owned: bool) -> str:
    """Fill the library's function table; called once by the library.

    Parameters
    ----------
    table, table_size : int
        Address and bytes of the table.
    fingerprint : str
        Of the header that the library was built from.
    owned : bool
        The library started this interpreter, so that its output is the library's affair.

    Returns
    -------
    str
        Lines that describe what was loaded.

    Raises
    ------
    ImportError
        A package is missing, or library and package are not of the same build.
    """
    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if missing:
        raise ImportError(f"missing Python packages: {', '.join(missing)} (searched: {sys.path})")

    load_functions()
    import atlas
    from atlas.capi import calls, log
    from atlas.capi._binding import ffi, lib

    built = ffi.string(lib.atlas_binding_fingerprint()).decode()
    if built != fingerprint:
        raise ImportError(
            f"libatlas_llm.so has ABI {fingerprint}, the package in {atlas.__path__[0]} has "
            f"{built}; install both from one wheel"
        )
    calls.require_complete()
    if owned:
        log.keep_off_stderr()
    if not lib.atlas_binding_fill(table, table_size):
        raise ImportError("the function tables of library and package differ in size")
    version = ".".join(map(str, sys.version_info[:3]))
    return f"atlas {atlas.__version__} in {atlas.__path__[0]}\nPython {version}\n"


def load_functions() -> None:
    """Import the modules that implement the header; each registers its functions."""
    for name in _MODULES:
        import_module(f"atlas.capi.{name}")
