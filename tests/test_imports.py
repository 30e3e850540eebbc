"""The three houses and their floors: allowed imports, and modules that may move data or handle processes.

The optimizer is ``muon_tutorial`` without ``learn/``. The course, ``learn/``, imports it. The lab, like all
of ``scripts/``, may import both. Imports go to the same floor or down, and never into a house above.

The checker reads source with ``ast`` and imports nothing it checks. ``violations`` needs only a folder, so it
is tested on small planted folders.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it on Python 3.10

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "muon_tutorial"

# Imports go to the same floor or down. A new module needs a line here, or a folder that has one.
FLOORS = {
    "errors": 0,
    "newton_schulz": 1,
    "orthogonalizers": 2,
    "adjusted_lr_and_decay": 1,
    "plan": 1,
    "launching": 1,
    "engine": 2,
    "step": 3,
    "worlds": 3,
    "parameters": 4,
    "evidence": 4,
    "guard": 5,
    "callbacks": 5,
    "optimizer": 6,
    "timing": 6,
    "checkpoint": 7,
    "training": 7,
    "": 8,  # the package's own __init__: the public surface, which only the course and the lab read
    "cli": 8,
    "__main__": 8,
    "learn": 9,
    "scripts": 10,
    "lab": 10,
}

# launching/ starts and stops processes; the lab starts what it measures or breaks.
HANDLE_PROCESSES = ("scripts", "lab", "launching")

KNOW_NO_GROUP = (
    "errors",
    "newton_schulz",
    "orthogonalizers",
    "adjusted_lr_and_decay",
    "plan",
    "engine",
)

# Modules that may move data. Besides the live world, most hold the reference of an exercise in which readers'
# code moves the bytes. loop.py moves bytes because lesson 15 breaks it. my_muon's reference is the file that
# readers end with, and training is the loop around it. one_page.py is the whole step without the package.
MOVERS = {
    f"{PACKAGE}.worlds.live",
    f"{PACKAGE}.learn.first_muon.on_ranks",
    f"{PACKAGE}.learn.the_grid.on_ranks",
    f"{PACKAGE}.learn.cuts.on_ranks",
    f"{PACKAGE}.learn.shards_alone.on_ranks",
    f"{PACKAGE}.learn.bill.on_ranks",
    f"{PACKAGE}.learn.many_ranks.on_ranks",
    f"{PACKAGE}.learn.own_sharding.on_ranks",
    f"{PACKAGE}.learn.builds.reference.ring",
    f"{PACKAGE}.learn.builds.reference.pipeline",
    f"{PACKAGE}.learn.broken_runs.training_rank",
    f"{PACKAGE}.learn.broken_runs.loop",
    f"{PACKAGE}.learn.my_muon.reference",
    f"{PACKAGE}.learn.my_muon.training",
    "scripts.one_page",
}

# Names in torch.distributed, by their beginnings: all_gather_into_tensor, irecv, ...
MOVES_DATA = re.compile(r"(all_)?(gather|reduce|to_all)|scatter|broadcast|(batch_)?i?(send|recv)")

# Modules by family; functions of os and asyncio by their beginnings: execv, spawnl, killpg, ...
STARTS_OR_STOPS = re.compile(
    r"((torch\.)?multiprocessing|subprocess|torch\.distributed\.(elastic|launcher))(\.|$)"
    r"|concurrent\.futures\.ProcessPoolExecutor|asyncio\.create_subprocess_"
    r"|os\.(_exit|abort|exec|fork|kill|popen|posix_spawn|spawn|system)"
)

ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv", "os.unsetenv")


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name (without ``__init__``), path, imports, and the names that it reads.

    The record does not hold the syntax tree: with a million nodes in memory, garbage collections take most of
    the time.
    """

    name: str
    path: Path
    imports: list[ast.Import | ast.ImportFrom]
    reads: list[tuple[int, list[str], bool]]

    @property
    def part(self) -> str:
        """This module's key in ``FLOORS``."""
        names = self.name.split(".")
        if names[0] == PACKAGE:
            return names[1] if len(names) > 1 else ""
        return "lab" if names[:2] == ["scripts", "lab"] else names[0]


@cache
def read_modules(root: Path) -> list[Module]:
    """Parse every module of the package, and of scripts/, under ``root``.

    A script is a tool: it may start processes and read its environment, but moves no data between ranks.
    """
    paths = sorted([*(root / PACKAGE).rglob("*.py"), *(root / "scripts").rglob("*.py")])
    modules = []
    for path in paths:
        names = path.relative_to(root).with_suffix("").parts
        name = ".".join(names[:-1] if names[-1] == "__init__" else names)
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules.append(Module(name, path, imports, [*names_in(nodes)]))
    return modules


def names_in(nodes: list[ast.AST]) -> Iterator[tuple[int, list[str], bool]]:
    """Yield every name with its attributes: (line, the parts of the dotted name, whether it is called)."""
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in inner:
            names: list[str] = []
            head: ast.expr = node
            while isinstance(head, ast.Attribute):
                names.insert(0, head.attr)
                head = head.value
            if isinstance(head, ast.Name):
                yield node.lineno, [head.id, *names], node in called


def imported(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, local name, dotted target) for every import in a module, also inside functions."""
    for node in module.imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.name if alias.asname else alias.name.split(".")[0]
                yield node.lineno, alias.asname or bound, alias.name
        else:
            package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{base}.{alias.name}"


def used(module: Module) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, dotted name, whether it is called) for all that a module reads through imported names."""
    targets = {}
    for _, local, target in imported(module):
        plain = local == target.split(".")[0]  # `import a.b` binds a
        targets[local] = local if plain else target
    for line, (head, *names), is_called in module.reads:
        if head in targets:
            yield line, ".".join([targets[head], *names]), is_called


def is_in(name: str, *families: str) -> bool:
    """Tell whether a dotted name is one of the families or lies inside one."""
    return any(name == family or name.startswith(family + ".") for family in families)


def floor_of(target: str, known: set[str]) -> int:
    """Return the floor of the module that an import of ``target`` reaches."""
    names = target.split(".")
    if names[0] == "scripts":
        return FLOORS["scripts"]
    inside = len(names) > 1 and (names[1] in FLOORS or f"{PACKAGE}.{names[1]}" in known)
    return FLOORS.get(names[1], 0) if inside else FLOORS[""]


def violations(root: Path) -> list[str]:
    """Return every broken rule under ``root`` as ``path:line what``, in order."""
    modules = read_modules(root)
    known = {module.name for module in modules}
    found = {(str(m.path.relative_to(root)), *broken) for m in modules for broken in broken_rules(m, known)}
    return [f"{where}:{line} {said}" for where, line, said in sorted(found)]


def broken_rules(module: Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for every rule one module breaks."""
    if module.part not in FLOORS:
        yield 1, f"has no floor: add {module.part!r} to FLOORS in tests/test_imports.py"
        return
    floor = FLOORS[module.part]
    for line, _, target in imported(module):
        if is_in(target, PACKAGE, "scripts") and floor_of(target, known) > floor:
            yield line, f"imports {target}, floor {floor_of(target, known)}, from floor {floor}"
        if module.part in KNOW_NO_GROUP and is_in(target, "torch.distributed"):
            yield line, f"imports {target}: it knows no process group"
    for line, name, is_called in used(module):
        moves = is_in(name, "torch.distributed") and MOVES_DATA.match(name.split(".")[-1])
        if moves and module.name not in MOVERS:
            yield line, f"uses {name}: calls that move data live in worlds/live.py"
        if module.part not in HANDLE_PROCESSES and is_called and STARTS_OR_STOPS.match(name):
            yield line, f"calls {name}: processes are started and stopped in launching/"
        if module.part not in ("worlds", *HANDLE_PROCESSES) and is_in(name, *ENVIRONMENT):
            yield line, f"uses {name}: the environment is read in worlds/ only"


def test_the_package_keeps_its_floors() -> None:
    assert violations(ROOT) == []
    assert {module.part for module in read_modules(ROOT)} >= {"plan", "engine", "worlds"}


def test_the_package_names_its_own_modules_relatively() -> None:
    """Internal imports should have one form. ``__main__`` may differ, because only it may be run as a file.

    zero3.py and the builds' tests differ because readers have such files.
    """
    found = {
        module.name
        for module in read_modules(ROOT)
        for node in module.imports
        if isinstance(node, ast.ImportFrom) and is_in(node.module or "", PACKAGE)
    }
    assert {name for name in found if is_in(name, PACKAGE)} == {
        f"{PACKAGE}.__main__",
        f"{PACKAGE}.learn.builds.reference.zero3",
        *(f"{PACKAGE}.learn.builds.tests.{build}" for build in ("one_page", "pipeline", "ring", "zero3")),
    }


def declared(*extras: str) -> set[str]:
    """Return the packages that pyproject.toml allows: the dependencies, and those of the named extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {re.split(r"[^\w.-]", line)[0] for group in groups for line in group}


@pytest.mark.parametrize(("folder", "extras"), [(PACKAGE, ()), ("scripts", ("notebooks", "tests", "hosts"))])
def test_imports_of_others_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    brought = {"IPython", "traitlets"}  # installed by ipywidgets
    asked = {"peft", "trl", "datasets", "tokenizers"}  # two recipes need these, and are skipped without them
    beside = (ROOT / "scripts" / "recipes", ROOT / PACKAGE / "learn" / "builds" / "tests")
    siblings = {path.stem for folder in beside for path in folder.glob("*.py")}  # imported by name
    mine = {PACKAGE, "scripts", *siblings, *brought, *asked, *sys.stdlib_module_names}
    modules = [module for module in read_modules(ROOT) if module.name.split(".")[0] == folder]
    used_names = {target.split(".")[0] for module in modules for _, _, target in imported(module)}
    assert used_names - mine - declared(*extras) == set()


PLANTED = {
    "from a floor above": ("plan/x.py", "from muon_tutorial.engine import travel"),
    "by a relative import of the parent": ("engine/__init__.py", "from .. import optimizer"),
    "inside a function": ("newton_schulz.py", "def f():\n    import muon_tutorial.engine.hop_collectives"),
    "from the public surface": ("training/x.py", "from muon_tutorial import Muon"),
    "from a script": ("learn/x.py", "import scripts.distributed_muon"),
    "of the lab by the optimizer": ("cli.py", "from scripts.lab import faults"),
    "of the course by the optimizer": ("cli.py", "from .learn.course import series"),
    "data moved through an alias": ("training/x.py", "import torch.distributed as dist\ndist.all_reduce(t)"),
    "data moved through a name": ("optimizer/x.py", "from torch.distributed import broadcast as b\nb(t, 0)"),
    "data moved by the full name": (
        "optimizer/x.py",
        "import torch.distributed\ntorch.distributed.send(t, 1)",
    ),
    "a function of collectives handed on": ("learn/x.py", "from torch import distributed as d\nf = d.isend"),
    "a process started": ("learn/x.py", "import subprocess\nsubprocess.run(['true'])"),
    "a process stopped": ("training/x.py", "from os import killpg\nkillpg(1, 9)"),
    "processes from torch": ("worlds/live.py", "import torch.multiprocessing as mp\nmp.spawn(f)"),
    "a process group in the engine": ("engine/x.py", "import torch.distributed as dist"),
    "the environment by name": ("optimizer/x.py", "from os import environ\nenviron.get('RANK')"),
    "a module without a floor": ("helpers.py", "x = 1"),
}


@pytest.mark.parametrize(("path", "source"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, source: str) -> None:
    """The package itself passes, which shows what is allowed."""
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    found = violations(tmp_path)
    assert found
    assert all(line.startswith(f"{PACKAGE}/{path}:") for line in found)
