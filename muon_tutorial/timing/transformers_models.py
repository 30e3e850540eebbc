"""Gets a model's shape from transformers, which builds it on the meta device, where weights take no memory.

transformers is optional, and its import takes seconds, so it is imported only here, and only if
``model_configs`` cannot read a type by hand. Code that comes with a config (``auto_map``) is not run.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .model_shape import ModelShape
from .module_shapes import shape_from_module

MOST_LAYERS = 10_000
"""The largest number of layers that is built. No model has so many, and building more, one by one, would take
minutes."""


def shape_from_transformers(held: Mapping[str, Any], name: str, source: str, where: str) -> ModelShape:
    """The shape of the model that transformers builds from a config; ``where`` names the file in errors.

    transformers builds the class that ``architectures`` names, if there is one. Tensor parallelism cuts as
    the class's own ``tp_plan`` says. If the config does not say how wide or deep the model is, a note names
    the default.

    Raises:
        UsageError: transformers is not installed, does not know the type, or cannot build the model.
    """
    model_type = str(held["model_type"])
    try:
        library = importlib.import_module("transformers")
    except Exception as error:
        raise UsageError(
            f"{where}: only transformers reads model_type {model_type!r}; install the extra 'hosts' "
            f"({in_one_line(error)}), or use module:function"
        ) from None
    if model_type not in library.CONFIG_MAPPING:
        raise UsageError(
            f"{where}: model_type {model_type!r} is not known, not even to transformers "
            f"{library.__version__}. For other models, use module:function"
        )
    depths = {
        key: it for key, it in held.items() if key.endswith(("layers", "layer")) and isinstance(it, int)
    }
    if deep := [key for key, layers in depths.items() if layers > MOST_LAYERS]:
        raise UsageError(f"{where}: {deep[0]!r} is at most {MOST_LAYERS:,}; got {held[deep[0]]!r:.40}")
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = library.AutoConfig.for_model(**held)
            model = _built(library, held, config)
        text = config.get_text_config()
        found = [getattr(text, f"num_{kind}_heads", None) for kind in ("attention", "key_value")]
        heads, kv_heads = (one if isinstance(one, int) else None for one in found)
        keys = {key: config.attribute_map.get(key, key) for key in ("hidden_size", "num_hidden_layers")}
        unsaid = [
            said for key, said in keys.items() if hasattr(config, key) and not {key, said} & held.keys()
        ]
        defaults = ", ".join(f"{said} {getattr(config, said)}" for said in unsaid)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: transformers cannot build it: {in_one_line(error):.300}") from None
    shape = shape_from_module(model, name, source, getattr(model, "tp_plan", None))
    notes = (f"Not in the config, so transformers' defaults are taken: {defaults}.",) if defaults else ()
    return replace(shape, heads=heads, kv_heads=kv_heads, notes=(*notes, *shape.notes))


def _built(library: Any, held: Mapping[str, Any], config: Any) -> nn.Module:
    """The model that ``architectures`` names; else a language model; else a model without a head."""
    for named in held.get("architectures") or ():
        found = getattr(library, str(named), None)
        if isinstance(found, type) and issubclass(found, library.PreTrainedModel):
            return found(config)
    encodes = getattr(config, "is_encoder_decoder", False)
    with_head = library.AutoModelForSeq2SeqLM if encodes else library.AutoModelForCausalLM
    auto = with_head if type(config) in with_head._model_mapping else library.AutoModel
    return auto.from_config(config)


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
