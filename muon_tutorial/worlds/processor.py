"""Describes the processor of this process: its name, the limits set on its libraries, and the threads."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep libraries from using some of a processor's instructions."""


def describe_processor(device: torch.device) -> str:
    """Return everything that affects the speed of matrix products in this process, as one line of text."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    parts = [f"torch {torch.__version__}", *limits]
    if device.type == "cpu":
        parts = [_processor_name(), f"{torch.get_num_threads()} threads", *parts]
    elif device.type == "cuda":
        parts = [torch.cuda.get_device_name(device), *parts]
    else:
        parts = [device.type, *parts]
    return ", ".join(parts)


def _processor_name() -> str:
    """Return the processor's name, with details that distinguish it from others of the same name."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return f"{platform.machine()} {platform.processor()}".strip()
    facts = dict[str, str]()
    for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    name = facts.get("model name", platform.machine())
    return " ".join([name, *(facts[key] for key in ("cpu family", "model") if key in facts), *flags])
