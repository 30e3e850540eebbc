"""Finds the model to plan for: a public one by name, a ``config.json``, or a function of yours.

``public_models.json`` holds the sizes in each public model's ``config.json``, and that file's address.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .machine import read_json
from .model_configs import shape_from_config
from .model_shape import ModelShape
from .module_shapes import shape_from_module
from .transformers_models import in_one_line

PUBLIC_MODELS = Path(__file__).with_name("public_models.json")


def find_model(name: str) -> ModelShape:
    """The shape of a model.

    ``name`` is one of ``public_names()``, a ``config.json`` as Hugging Face's libraries write it, a folder
    with one, or ``module:function``. The function takes no arguments and returns an ``nn.Module``. The meta
    device is the default during the call, so that a model of any size takes no memory; a function that uses
    another device gives the same sizes. What the function prints goes to standard error.

    Raises:
        UsageError: there is no such model, or it cannot be read; the error says why in one line.

    >>> shape = find_model("llama-3.1-8b")
    >>> shape.parameters, shape.layers, [family.name for family in shape.families][-1]
    (8030261248, 32, 'layers.*.mlp.down')
    """
    public = _public_models()
    if name in public:
        held = public[name]
        return shape_from_config(held["config"], name, held["source"], f"the config of {name}")
    if os.path.exists(name):
        path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
        what, said = f"the model {path}", path.parent.name if path.name == "config.json" else path.stem
        return shape_from_config(read_json(path, what), said or "model", str(path), what)
    asked = name.rpartition("/")[2].lower()
    begins = [one for one in public if asked and one.startswith(asked)]
    near = begins or difflib.get_close_matches(asked, public, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    if name.endswith(".json") or "/" in name:
        raise UsageError(f"the model {name} cannot be read: No such file or directory{meant}")
    if ":" in name:
        return _from_function(name)
    raise UsageError(
        f"no model is called {name!r}{meant or '.'} Known are {', '.join(public)}; "
        "or give the path of a config.json, or module:function"
    )


def public_names() -> tuple[str, ...]:
    """The names of the public models, from small to large within a family."""
    return tuple(_public_models())


@cache
def _public_models() -> dict[str, Any]:
    return dict(json.loads(PUBLIC_MODELS.read_text(encoding="utf-8")))


def _from_function(name: str) -> ModelShape:
    module_name, _, function_name = name.partition(":")
    try:
        with redirect_stdout(sys.stderr):
            function = getattr(importlib.import_module(module_name), function_name, None)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the module of {name} cannot be imported: {in_one_line(error)}") from None
    if not callable(function):
        raise UsageError(f"the module of {name} has no function {function_name!r}")
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):
            model = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}() failed: {in_one_line(error)}") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name}() must return a torch.nn.Module; it returned {type(model).__name__}")
    shape = shape_from_module(model, name, f"{name}()")
    if not shape.families:
        raise UsageError(f"{name}() returned {type(model).__name__}, which has no hidden matrix for Muon")
    return shape
