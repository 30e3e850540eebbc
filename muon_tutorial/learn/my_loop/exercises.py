"""Exercises of lesson 16: which lines change, the port, surviving a kill, and the quiz."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...checkpoint import CheckpointManager
from ...errors import CheckpointError, RankFailedError
from ...launching.launch import launch
from ..exercises.judge import Diagnosis, Exercise, MistakeError, OpenAnswerError, names_or_none, numbers
from ..exercises.on_real_ranks import say_failure
from . import lives, trials
from .lives import PATIENCE, RunLife
from .port import ECHO, LR, MAX_NORM, Port, RunJob, factor_of
from .trials import MadeOptimizer, PortReport, UpdateReport, expected_settings, plain_lines

_STAYS = {
    "shard(model)": "fully_shard and parallelize_module stay as they are. What matters is what comes after.",
    "LambdaLR": "MuonWithAdamW is a torch Optimizer with groups: the scheduler takes it as it takes AdamW.",
    "for step": "The loop's range does not depend on the optimizer, and matters only when a run is resumed.",
    "loss =": "The model and its loss know nothing of optimizers.",
    "backward": "FSDP2 sums and cuts the gradients in the backward pass, whichever optimizer steps.",
    "clip_grad_norm_": "On DTensors, clip_grad_norm_ takes the norm of the whole gradient: right as it is.",
    "optimizer.step": "One optimizer, one step: MuonWithAdamW steps both of its parts.",
    "scheduler.step": "One scheduler moves the groups of both parts.",
    "zero_grad": "zero_grad of MuonWithAdamW clears the gradients of both parts.",
    "AdamW(": "That line makes the optimizer. Loading restores the state that the optimizer loses in a kill.",
    "torch.save": "Saving does not depend on which optimizer steps.",
}
_STAYS_TO_SURVIVE = {
    "LambdaLR": "The scheduler's count has to come back, but the line that you add for loading does that. "
    "This line makes the scheduler as before."
}


def line_of(text: str) -> int:
    """The number of the plain loop's line that contains ``text``."""
    return next(number for number, line in enumerate(plain_lines(), 1) if text in line)


def check_lines() -> Exercise:
    """The exercise: which lines of the plain loop change for Muon, and which change to survive a kill."""
    right = {
        "for_muon": {line_of("AdamW("): "It gives every parameter to AdamW, hidden matrices included."},
        "to_survive": {
            line_of("for step"): "After a restart, range(steps) begins at 0, so the run repeats data.",
            line_of("torch.save"): "Under FSDP2, rank 0 has only a part of each matrix, so the file "
            "would hold only that part. It would also lack the momentum, and be written only at the end.",
        },
    }

    def judge(for_muon: object, to_survive: object) -> str | Diagnosis | None:
        for name, answer in {"for_muon": for_muon, "to_survive": to_survive}.items():
            lines = plain_lines()
            said = names_or_none(answer, range(1, len(lines) + 1), int)
            if said is None:
                return f"{name}: give a list of line numbers from 1 to {len(lines)}, such as [1, 6]."
            if extra := sorted(set(said) - set(right[name])):
                known = {**_STAYS, **_STAYS_TO_SURVIVE} if name == "to_survive" else _STAYS
                why = next(why for text, why in known.items() if text in lines[extra[0] - 1])
                hints = (_LOOK[name], f"{len(right[name])} in all.")
                return Diagnosis(f"{name}: line {extra[0]} stays. {why}", hints)
            if missing := sorted(set(right[name]) - set(said)):
                what = f"{name}: {len(set(said))} found, and another line has to change."
                return Diagnosis(what, (_LOOK[name], right[name][missing[0]]))
        return None

    two = "where the loop begins and how it saves. You also add a line that loads."
    return Exercise(judge, praise=f"One line changes for Muon. To survive a kill, two change: {two}")


_LOOK = {
    "for_muon": "Which lines depend on the kind of optimizer? All other lines see just an Optimizer.",
    "to_survive": "Which facts does a new process lack? The place in the data, and the saved state.",
}


def check_port(dp: int, tp: int, seed: int, backend: str = "gloo") -> Exercise:
    """The exercise: ``prepare`` and ``update``, tried on real ranks for a few steps."""

    def judge(prepare: Callable, update: Callable) -> str | Diagnosis | None:
        _check_callable(prepare=prepare, update=update)
        arguments = ((dp, tp), seed, prepare, update)
        asked: dict[str, Any] = {"args": arguments, "backend": backend, "output": "quiet"}
        try:
            reports: list[PortReport] = launch(trials.try_port, dp * tp, **asked, timeout=PATIENCE)
        except RankFailedError as error:
            raise MistakeError(say_failure(error)) from None
        if any(report.is_open for report in reports):
            raise OpenAnswerError
        return explain_port(reports[0])

    praise = "The hidden matrices go to Muon, the rest to AdamW, and the whole gradient is clipped."
    return Exercise(judge, ("prepare(model, shard) and update(model, optimizer, scheduler).",), praise)


def _check_callable(**functions: object) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise MistakeError(f"{name} must be a function.")


def explain_port(report: PortReport) -> Diagnosis | None:
    assert report.made is not None
    if wrong := _wrong_make(report.made):
        return wrong
    for step, update in enumerate(report.updates):
        rates = tuple(LR * factor_of(at, 2 * trials.TRIED) for at in (step, step + 1))
        if (found := _wrong_update(update, *rates)) is not None:
            return Diagnosis(f"In step {step}: {found.what}", found.hints)
    return None


_MAKE = "MuonWithAdamW.from_model(model, lr=…, adamw_lr=…, weight_decay=…)"
_REPLACED = "Cutting the model has put new parameters in their place."
_ORDER = "As in the plain loop: clip, optimizer.step(), scheduler.step(), zero_grad()."


def _wrong_make(made: MadeOptimizer) -> Diagnosis | None:
    if made.kind != "MuonWithAdamW" and not made.forgotten:
        what = f"prepare returned {made.kind}. Use Muon for the hidden matrices and AdamW for the rest."
        return Diagnosis(what, ("One optimizer of this package has both inside.", _MAKE))
    if made.forgotten and made.is_cut and made.kind == "MuonWithAdamW":
        lacks = f"{made.forgotten[0]} of the cut model is not in it"
        what = f"The optimizer was made over the old parameters: {lacks}. {_REPLACED}"
        return Diagnosis(what, ("Which of your two lines comes first?", "Cut first, then make."))
    if not made.is_cut:
        return Diagnosis("The model was not cut.", ("Line 1 of the plain loop does it.", "shard(model)"))
    if made.kind != "MuonWithAdamW":
        what = f"prepare must return the optimizer, but it returned a {made.kind}."
        return Diagnosis(what, ("Is there a return in front of it?", _MAKE))
    for name, (who, lr, decay) in expected_settings().items():
        found_who, found_lr, found_decay = made.settings[name]
        if found_who != who:
            there = "Hidden matrices go to Muon, embedding and head to AdamW."
            what = f"{name} is stepped by {found_who}. {there}"
            return Diagnosis(what, ("from_model tells them apart by itself. Did you pass exclude?", _MAKE))
        if not math.isclose(found_lr, lr):
            hint = "With only lr, both parts use one rate, and Muon's updates are scaled to AdamW's size."
            return Diagnosis(f"{name} has the learning rate {found_lr:g}, not {lr:g}.", (hint, _MAKE))
        if not math.isclose(found_decay, decay):
            what = f"{name} has the weight decay {found_decay:g}, not {decay:g}."
            return Diagnosis(what, ("Unless you pass one, each part keeps its own default.", _MAKE))
    return None


def _wrong_update(update: UpdateReport, rate: float, rate_after: float) -> Diagnosis | None:
    if len(update.norms_stepped) != 1:
        what = f"the optimizer stepped {len(update.norms_stepped)} times, not once."
        return Diagnosis(what, ("One optimizer.step() steps both parts.", _ORDER))
    [norm] = update.norms_stepped
    if update.largest_shard <= MAX_NORM * 1.001 < norm < update.norm_before * 0.999:
        own = f"No rank's own part had a norm above {MAX_NORM:g}: each rank has clipped its own shard."
        what = f"the gradient's norm was {norm:.3f} at the step, not {MAX_NORM:g}. {own}"
        return Diagnosis(what, ("clip_grad_norm_ wants the parameters, not their local parts.",))
    if norm > MAX_NORM * 1.001:
        what = f"the gradient's norm was {norm:.3f} at the step, not {MAX_NORM:g}: it was not clipped before."
        return Diagnosis(what, ("torch.nn.utils.clip_grad_norm_(model.parameters(), …)", _ORDER))
    if norm < MAX_NORM * 0.999:
        what = f"the gradient's norm was {norm:.3f} at the step: it must be clipped to {MAX_NORM:g}."
        return Diagnosis(what, ("Is it clipped once, and to the right norm?", _ORDER))
    if not math.isclose(update.rate, rate):
        what = "the scheduler had moved before the optimizer stepped."
        return Diagnosis(what, ("Step first, with the rate of this step.", _ORDER))
    if not math.isclose(update.rate_after, rate_after):
        what = f"the learning rate was {update.rate_after:g} afterwards, not {rate_after:g}."
        return Diagnosis(what, ("Does the scheduler step, once?", _ORDER))
    if update.left:
        what = "the gradients are still there afterwards; the next ones would be added to them."
        return Diagnosis(what, ("Which line of the plain loop clears them?", _ORDER))
    return None


def check_survival(
    dp: int, tp: int, job: RunJob, ported: Exercise, backend: str = "gloo", timeout: float = PATIENCE
) -> Exercise:
    """The exercise: ``save`` and ``load``. A rank is killed, and the run resumes on another grid.

    The two other functions are the reader's if they have passed in ``ported``, otherwise the reference's.
    """

    def judge(save: Callable, load: Callable) -> str | Diagnosis | None:
        _check_callable(save=save, load=load)
        prepare, update = (Port().prepare, Port().update) if ported.accepted is ... else ported.accepted
        try:
            life = lives.live(dp, tp, job, Port(prepare, update, save, load), backend, timeout)
        except RankFailedError as error:
            said = str(error)
            if "not all ranks called it" in said:
                what = "The ranks waited for each other in a save: some of them never called it."
                hint = "Each rank holds a part of every matrix. Which ranks must call manager.save?"
                return Diagnosis(what, (hint,))
            if "holds no complete checkpoint" in said:
                what = "load also runs at the start of a new run, when nothing has been saved."
                return Diagnosis(what, ("Then manager.latest_step() is None: return 0.",))
            return Diagnosis(say_failure(error))
        if life is None:
            raise OpenAnswerError
        return explain_life(life)

    hint = "manager.save(step, model, optimizer, extra={…}) on every rank; manager.load returns that extra."
    again = "Only the steps since that checkpoint had to be done again."
    praise = f"A rank was killed, other ranks went on from the checkpoint on another grid. {again}"
    return Exercise(judge, (hint,), praise, keeps=("save", "load"))


def explain_life(life: RunLife) -> Diagnosis | None:
    every, last = life.job.every, life.last
    try:
        saved = lives.opened(life.left, every)
    except CheckpointError as error:
        what = f"After the kill there was no checkpoint of step {every} that can be read: {error}."
        return Diagnosis(what, ("CheckpointManager's save makes one, if all ranks call it.",))
    if not lives.same_bits(saved, lives.opened(life.folder / ECHO, last.begin)):
        what = "What the new ranks held when they began is not what was saved."
        return Diagnosis(what, ("manager.load(model, optimizer) puts both back.",))
    if last.begin != every:
        batches = "batches that had been seen came again" if last.begin < every else "batches were left out"
        what = f"The model is that of step {every}, but the loop went on with step {last.begin}"
        what += f": the data's position was not restored as it was, and {batches}."
        hint = "load returns how many steps were done when the checkpoint was saved."
        return Diagnosis(what, (hint, "Save that number in extra."))
    for step, rate in last.rates.items():
        due = LR * factor_of(step, life.job.steps)
        if not math.isclose(rate, due, rel_tol=1e-6):
            was = f"In step {step} the learning rate was {rate:.4g}, not {due:.4g} as without a kill"
            what = f"{was}. The scheduler was not restored: it counts from 0 again."
            return Diagnosis(what, ("A scheduler has a state_dict(), too.",))
    if CheckpointManager(life.checkpoints).latest_step() != life.job.steps:
        hint = "save is called with the number of steps done. Pass that on to the manager."
        return Diagnosis(f"After the last step there is no checkpoint of step {life.job.steps}.", (hint,))
    return None


def quiz() -> Exercise:
    return numbers(
        ("twice", 3, "What was done after the last checkpoint is lost."),
        ("files", 8, "Every rank writes one."),
        ("too_long", 3, "Squares of norms add up over ranks."),
    )


def finished_port(ported: Exercise, survived: Exercise) -> Port:
    """The reader's four functions; the reference's for those that have not passed, with a printed note."""
    open_ones = [name for name, it in (("prepare and update", ported), ("save and load", survived))
                 if it.accepted is ...]  # fmt: skip
    if open_ones:
        print(f"No right answer yet for {' or for '.join(open_ones)}: the reference is used.")
    made = () if ported.accepted is ... else ported.accepted
    kept = () if survived.accepted is ... else survived.accepted
    return Port(*(made or (Port().prepare, Port().update)), *(kept or (Port().save, Port().load)))


def all_exercises(dp: int, tp: int, job: RunJob, backend: str) -> tuple[Exercise, ...]:
    ported = check_port(dp, tp, job.seed, backend)
    return check_lines(), ported, check_survival(dp, tp, job, ported, backend)
