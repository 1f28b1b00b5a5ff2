"""The import rules of the design, checked on the syntax tree of every source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atlas.model import GROUPS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "atlas"
KERNELS = ROOT / "kernels"


@dataclass(frozen=True)
class Import:
    """One import: where it is, what it names, and whether it runs when the file is imported."""

    path: str  # relative to the repository
    line: int
    name: str
    lazy: bool  # inside a function
    typing: bool  # under TYPE_CHECKING

    def of(self, *packages: str) -> bool:
        """Whether it names one of the packages, or something inside."""
        return any(self.name == p or self.name.startswith(p + ".") for p in packages)


def imports_of(source: str, path: str) -> Iterator[Import]:
    """Every import of a file; ``from a import b`` names ``a.b``."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            yield Import(path, node.lineno, name, lazy, typing)  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lazy = True
        guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy, typing or guard)

    yield from walk(ast.parse(source, path), lazy=False, typing=False)


def all_imports() -> list[Import]:
    files = [*sorted(PACKAGE.rglob("*.py")), *sorted(KERNELS.rglob("*.py"))]
    return [
        found
        for file in files
        for found in imports_of(file.read_text(), file.relative_to(ROOT).as_posix())
    ]


IMPORTS = all_imports()


def within(folder: str) -> Callable[[Import], bool]:
    return lambda found: found.path.startswith(folder)


def violations(where: Callable[[Import], bool], forbidden: Callable[[Import], bool]) -> list[str]:
    return [f"{i.path}:{i.line} {i.name}" for i in IMPORTS if where(i) and forbidden(i)]


def test_the_walk_sees_the_tree() -> None:
    paths = {found.path for found in IMPORTS}
    assert len(paths) > 60
    assert any(
        i.of("numba") and i.path.startswith("src/atlas/backends/cpu/bodies") for i in IMPORTS
    )
    assert any(i.lazy for i in IMPORTS)
    assert any(i.typing for i in IMPORTS)


def test_the_walk_tells_lazy_from_eager() -> None:
    source = "import a\ndef f():\n    from b import c\nif TYPE_CHECKING:\n    import d\n"
    found = {(i.name, i.lazy, i.typing) for i in imports_of(source, "x.py")}
    assert found == {("a", False, False), ("b.c", True, False), ("d", False, True)}


def test_kernels_import_nothing_of_atlas() -> None:
    assert violations(within("kernels/"), lambda i: i.of("atlas")) == []


def test_ops_import_no_backend() -> None:
    assert violations(within("src/atlas/ops/"), lambda i: i.of("atlas.backends")) == []


def test_ops_depend_on_nothing_above_them() -> None:
    above = ("atlas.model", "atlas.layers", "atlas.architectures", "atlas.engine", "atlas.weights")
    assert violations(within("src/atlas/ops/"), lambda i: i.of(*above)) == []


@pytest.mark.parametrize("group", GROUPS)
def test_capability_groups_do_not_import_each_other(group: str) -> None:
    others = [f"atlas.model.{other}" for other in GROUPS if other != group]
    path = f"src/atlas/model/{group}.py"
    assert (ROOT / path).is_file()
    assert violations(lambda i: i.path == path, lambda i: i.of(*others) and not i.typing) == []


def test_only_the_cuda_backend_and_kernels_import_cuda() -> None:
    allowed = ("src/atlas/backends/cuda/", "kernels/")
    assert (
        violations(
            lambda i: not i.path.startswith(allowed),
            lambda i: i.of("cuda", "numba.cuda", "numba_cuda", "nvmath", "cupy"),
        )
        == []
    )


def test_atlas_never_imports_numba_cuda() -> None:
    assert violations(within("src/atlas/"), lambda i: i.of("numba.cuda", "numba_cuda")) == []


def test_numba_is_imported_by_bodies_and_lazily_by_the_compiler() -> None:
    bodies, compiler = "src/atlas/backends/cpu/bodies/", "src/atlas/backends/cpu/compiler.py"
    outside = violations(
        lambda i: not i.path.startswith((bodies, "kernels/")) and i.path != compiler,
        lambda i: i.of("numba"),
    )
    eager = violations(lambda i: i.path == compiler, lambda i: i.of("numba") and not i.lazy)
    assert outside + eager == []


def test_bodies_are_imported_only_to_be_compiled() -> None:
    bodies = "src/atlas/backends/cpu/bodies/"
    assert (
        violations(
            lambda i: not i.path.startswith(bodies),
            lambda i: i.of("atlas.backends.cpu.bodies") and not i.lazy,
        )
        == []
    )


def test_no_deep_learning_framework_at_run_time() -> None:
    frameworks = ("torch", "transformers", "tensorflow", "jax", "gguf", "accelerate")
    assert violations(lambda _: True, lambda i: i.of(*frameworks)) == []


def test_native_code_knows_integers_and_pointers_only() -> None:
    """Of atlas, Cython files may import each other and the errors; of NumPy, only arrays to hand
    out. Tensors, ops and models are unknown to them."""
    pattern = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))", re.MULTILINE)
    seen = 0
    for file in sorted((PACKAGE / "_native").glob("*.p[yx][xd]")):
        for found in pattern.finditer(file.read_text()):
            name = found[1] or found[2]
            seen += 1
            if name.partition(".")[0] == "atlas":
                assert name.startswith("atlas._native") or name == "atlas.errors", (
                    f"{file.name}: {name}"
                )
            else:
                assert name.partition(".")[0] not in ("torch", "numba"), f"{file.name}: {name}"
    assert seen > 5
