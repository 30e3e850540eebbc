"""Makes the reference from the docstrings with pdoc: a page for each module below the public surface.

    python scripts/reference.py [--out FOLDER]     written to dist/pages/reference/

No page contains a script or loads anything. ``muon_tutorial.learn`` is left out because it contains the
answers. ``python scripts/pages.py`` also writes the reference.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import warnings
from pathlib import Path

from pdoc import render
from pdoc.doc import Module, Variable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import muon_tutorial
from scripts.files import POLICY, ROOT, made, run_writer, write_whole

TARGET = ROOT / "dist" / "pages" / "reference"
TEMPLATES = Path(__file__).parent / "reference_template"
SURFACE = muon_tutorial.__name__
LEFT_OUT = {"__main__", "cli", "learn"}
_CHARSET = '<meta charset="utf-8">'
_POLICY = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def documented() -> list[str]:
    """The names of the package, of its folders (rooms), and of all modules in them."""
    [place] = muon_tutorial.__path__
    rooms = [room.name for room in pkgutil.iter_modules([place]) if room.name not in LEFT_OUT]
    inside = [pkgutil.walk_packages([f"{place}/{room}"], f"{SURFACE}.{room}.") for room in rooms]
    names = [SURFACE, *[f"{SURFACE}.{room}" for room in rooms], *[m.name for each in inside for m in each]]
    return sorted(name for name in names if not name.endswith(".__main__"))


def _first(module: Module) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    return re.split(r"\.(?:\s|$)", module.docstring, maxsplit=1)[0].replace("\n", " ")


def pages() -> dict[str, str]:
    """Each page's text, by its path below the reference's folder."""
    for name in muon_tutorial.__all__:  # pdoc finds only modules that are already imported
        getattr(muon_tutorial, name)
    modules = {name: Module.from_name(name) for name in documented()}
    for name, module in modules.items():
        if module.is_package and name != SURFACE:  # a room's page lists its modules
            rows = [
                f"- [`{it.name}`]({module.name}/{it.name}.html): {_first(it)}" for it in module.submodules
            ]
            module.docstring = "\n".join([module.docstring, "", *rows])
    for name, member in modules[SURFACE].members.items():
        others = [module.members[name].docstring for module in modules.values() if name in module.members]
        if isinstance(member, Variable) and not member.docstring:  # the defining module has the docstring
            member.docstring = next(filter(None, others), "")
    render.configure(docformat="google", search=False, show_source=False, template_directory=TEMPLATES)
    with warnings.catch_warnings():
        # Two warnings are expected: members that a subclass of Tensor inherits have no page, and a
        # NamedTuple's __init__ does not know the module of its annotations.
        for expected in ("Cannot determine where", r"Error parsing type annotation .*\.__init__\."):
            warnings.filterwarnings("ignore", expected, UserWarning)
        texts = {
            f"{name.replace('.', '/')}.html": render.html_module(modules[name], modules) for name in modules
        }
    texts["index.html"] = render.html_index(modules)
    return {name: text.replace(_CHARSET, _CHARSET + _POLICY, 1) for name, text in texts.items()}


def write(target: Path) -> None:
    texts = pages()
    for name, text in texts.items():
        made((target / name).parent)
        write_whole(target / name, text)
    size = sum(map(len, texts.values())) / 1e6
    print(f"wrote {target / 'index.html'} and {len(texts) - 1} more ({size:.2f} MB)")


if __name__ == "__main__":
    sys.exit(run_writer("reference", __doc__, write, None, TARGET))
