"""Imports point down, and heavy or optional packages load only where they are used: read with ast, nothing is run.

The layers: examples, tests, benchmarks > parallel > hccl > device, and acl > device.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("acl", "device", "hccl", "parallel")
#: What a package may import of the project; and of the rest of the world, whatever is not listed in a rule below.
ALLOWED = {
    "device": {"device"},
    "hccl": {"hccl", "device"},
    "parallel": {"parallel", "hccl", "device"},
    "acl": {"acl", "device"},
}
#: What a package may import from outside the standard library.
OUTSIDE = {
    "device": {"numpy", "numba", "ml_dtypes"},
    "hccl": {"numpy", "ml_dtypes", "mpi4py", "rich", "torch", "matplotlib"},
    "parallel": {"numpy", "numba", "ml_dtypes", "rich", "matplotlib"},
    "acl": {"numpy", "ml_dtypes"},
}
LAZY = {"numba", "ml_dtypes", "mpi4py", "torch", "matplotlib"}  # inside functions only: start-up time
MPI_FILES = {"hccl/bootstrap.py", "hccl/transport/mpi.py"}
STANDARD_LIBRARY_ONLY = {"launch.py", "hccl/launched.py"}
#: Modules that only compute: what they say of a collective must not depend on a device, a transport, a thread, a clock.
PURE = {
    "hccl.algorithms",
    "hccl.collectives",
    "hccl.render",
    "hccl.schedule",
    "hccl.select",
    "hccl.simulate",
    "hccl.topology",
    "hccl.verify",
}
IMPURE = {
    "_thread",
    "asyncio",
    "concurrent",
    "datetime",
    "device",
    "hccl.transport",
    "mpi4py",
    "multiprocessing",
    "socket",
    "threading",
    "time",
}


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands, and when it is executed."""

    file: str
    line: int
    module: str  # "hccl.transport.mpi"; of "from a import b" both "a" and "a.b" are listed
    function: str  # the outermost function it stands in, or nothing
    typing_only: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path, root: Path = ROOT) -> list[Import]:
    """Return all imports of a file."""
    file = path.relative_to(root).as_posix()
    package = file.removesuffix(".py").removesuffix("/__init__").split("/")
    if not file.endswith("/__init__.py"):
        package = package[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, function: str, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        line = getattr(node, "lineno", 0)
        found.extend(Import(file, line, name, function, typing_only) for name in names)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, function, True)
            for child in node.orelse:
                visit(child, function, typing_only)
            return
        if not function and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, function, typing_only)

    visit(ast.parse(path.read_text(encoding="utf-8"), file), "", False)
    return found


def package_files(package: str) -> Iterator[Path]:
    return iter(sorted((ROOT / package).rglob("*.py")))


def within(module: str, names: set[str]) -> bool:
    """Tell whether a module is one of the names or inside one."""
    parts = module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


ALL = {package: [entry for path in package_files(package) for entry in imports_of(path)] for package in PACKAGES}
EVERYWHERE = [entry for entries in ALL.values() for entry in entries]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    project = {*PACKAGES, "launch", "examples", "tests", "benchmarks"}
    wrong = [str(entry) for entry in ALL[package] if entry.top in project - ALLOWED[package]]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_depends_only_on_what_its_layer_may(package: str) -> None:
    known = sys.stdlib_module_names | set(PACKAGES) | OUTSIDE[package]
    wrong = [str(entry) for entry in ALL[package] if entry.top not in known]
    assert not wrong


def test_heavy_and_optional_packages_are_imported_inside_functions() -> None:
    wrong = [str(entry) for entry in EVERYWHERE if entry.top in LAZY and not (entry.function or entry.typing_only)]
    assert not wrong


def test_mpi4py_is_imported_in_two_files() -> None:
    wrong = [str(entry) for entry in EVERYWHERE if entry.top == "mpi4py" and entry.file not in MPI_FILES]
    assert not wrong


def test_torch_is_imported_in_one_file_at_most() -> None:
    assert len({entry.file for entry in EVERYWHERE if entry.top == "torch"}) <= 1


@pytest.mark.parametrize("file", sorted(STANDARD_LIBRARY_ONLY))
def test_what_is_on_the_way_of_every_start_needs_the_standard_library_only(file: str) -> None:
    wrong = [str(entry) for entry in imports_of(ROOT / file) if entry.top not in sys.stdlib_module_names]
    assert not wrong


def test_schedules_and_what_reads_them_know_no_device_transport_thread_or_clock() -> None:
    by_module = {module_name(path): imports_of(path) for path in package_files("hccl")}
    reached, todo = set(), [(name, name) for name in by_module if within(name, PURE)]
    wrong = []
    while todo:
        name, way = todo.pop()
        if name in reached:
            continue
        reached.add(name)
        for entry in by_module[name]:
            if entry.typing_only or entry.function == "main":  # a command line may look at the clock
                continue
            if within(entry.module, IMPURE):
                wrong.append(f"{entry} (reached by {way})")
            elif entry.module in by_module and entry.module != "hccl":
                todo.append((entry.module, f"{way} > {entry.module}"))
    assert not wrong


def module_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_the_reader_sees_every_form_of_import(tmp_path: Path) -> None:
    file = tmp_path / "hccl" / "transport" / "sample.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import a.b as c\nfrom . import base\nfrom ..errors import Root\nfrom hccl import waiting\n"
        "if TYPE_CHECKING:\n    import d\ndef f():\n    if g:\n        from e import h\n"
    )
    assert [(entry.module, entry.function, entry.typing_only) for entry in imports_of(file, tmp_path)] == [
        ("a.b", "", False),
        ("hccl.transport", "", False),
        ("hccl.transport.base", "", False),
        ("hccl.errors", "", False),
        ("hccl.errors.Root", "", False),
        ("hccl", "", False),
        ("hccl.waiting", "", False),
        ("d", "", True),
        ("e", "f", False),
        ("e.h", "f", False),
    ]
