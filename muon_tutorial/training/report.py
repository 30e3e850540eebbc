"""Tables that sum up a training run, for the end of the command's output."""

from __future__ import annotations

from rich import box
from rich.table import Table

from .job import OneProcessRun
from .records import CheckVerdict, PhaseTraffic, RunResult

NO_STEP = "no step was left to take"


def summary_table(result: RunResult, beside: OneProcessRun | None) -> Table:
    s = result.settings
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("grid", f"dp={s.dp} × tp={s.tp}, {s.world_size} processes, strategy {s.strategy}")
    table.add_row(
        "text", f"{result.text.source}, {result.text.size:,} bytes, SHA-256 {result.text.sha256[:16]}…"
    )
    table.add_row("model", f"{result.parameters:,} parameters; {s.tokens_per_step:,} bytes of text per step")
    table.add_row(
        "held-out loss", f"{result.loss_before:.3f} before, {result.loss_after:.3f} after (nats per byte)"
    )
    if beside is not None:
        table.add_row(
            "  on one process",
            f"{beside.result.loss_before:.3f} before, {beside.result.loss_after:.3f} after; "
            f"largest gap between the curves {beside.largest_gap:.3f}",
        )
    seconds, share = result.step_seconds, result.optimizer_share
    spent = NO_STEP if seconds is None else f"{1000 * seconds:.0f} ms (median), {share:.0%} in the optimizer"
    table.add_row("step time", spent)
    table.add_row("optimizer state", _state(result))
    table.add_row("check", describe_verdict(result.check, s.dp) if result.records else NO_STEP)
    if result.check is not None and result.check.audit:
        table.add_row("audit", result.check.audit, style=None if result.check.is_muon else "red")
    return table


def traffic_table(result: RunResult) -> Table:
    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        title="One optimizer step, on the rank that sends most",
        title_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    for heading in ("requests", "payload", "sent (ring model)"):
        table.add_column(heading, justify="right")
    counts = ("requests", "payload_bytes", "sent_bytes")
    total = PhaseTraffic("all", *(sum(getattr(row, name) for row in result.traffic) for name in counts))
    for row in (*result.traffic, total):
        table.add_row(row.phase, str(row.requests), size(row.payload_bytes), size(row.sent_bytes))
    return table


def describe_verdict(verdict: CheckVerdict | None, dp: int) -> str:
    if verdict is None:
        return "not asked for"
    if not verdict.is_muon:
        return f"FAILED at step {verdict.step + 1}: {verdict.audit}"
    if not verdict.passed:
        return (
            f"FAILED at step {verdict.step + 1}: {verdict.differing:,} parameter elements differ from the "
            f"single-process optimizers' results, by up to {verdict.largest_difference:.2g}; "
            f"the reduced gradient's error is {verdict.gradient_error:.2g} of its bound{_of_cut(verdict)}"
        )
    reduction = f"; the reduced gradient is within {verdict.gradient_error:.2f} of its rounding bound"
    return (
        f"passed at step {verdict.step + 1}: all {verdict.elements:,} parameters bitwise equal to "
        f"torch.optim.Muon's and AdamW's from the same gradients{_of_cut(verdict)}"
        f"{reduction if dp > 1 else ''}"
    )


def _of_cut(verdict: CheckVerdict) -> str:
    """The part of the sentence about matrices that stay cut; empty if there are none."""
    if not verdict.cut_error:
        return ""
    error = f"{verdict.cut_error:.2g} of their bound"
    return f", except those that stay cut, which differ from the Gram form by {error}"


def size(count: float) -> str:
    """Bytes as readable text, in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def _state(result: RunResult) -> str:
    low, high = min(result.state_bytes), max(result.state_bytes)
    each = size(high) if low == high else f"{size(low)} to {size(high)}"
    whole = result.adamw_state_bytes
    return f"{each} per rank: {high / whole:.0%} of the {size(whole)} that replicated AdamW keeps"
