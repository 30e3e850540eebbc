# %% [markdown]
# # 15 · It hangs, or lies. Which rank, which line?
#
# Your training stands still, or it runs and learns the wrong thing. Of all ranks and all lines, which one is it?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
# Set-up: nothing happens here where the package is installed.
import importlib.util, pathlib, subprocess, sys
if importlib.util.find_spec("muon_tutorial") is None:  # look here and at the repository's root, and leave torch alone
    here, root = pathlib.Path.cwd(), pathlib.Path.cwd().parent / "pyproject.toml"
    ours = here.name == "notebooks" and root.is_file() and 'name = "muon-tutorial"' in root.read_text(encoding="utf-8")
    places = [here, root.parent] if ours else [here]
    wheels = [str(wheel) for place in places for wheel in sorted(place.glob("muon_tutorial-*.whl"), reverse=True)]
    sys.path += [str(place) for place in places if (place / "muon_tutorial" / "learn").is_dir()]
    if not wheels and importlib.util.find_spec("muon_tutorial") is None:
        raise ModuleNotFoundError("upload this lesson's self-contained copy (python scripts/pack.py makes it), or the wheel")
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "cloudpickle", *wheels[:1]], check=True)
from muon_tutorial.learn import broken_runs as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty minutes.** At the end you can find the guilty rank and line of a broken distributed run in about five
# minutes, and say when a difference is no bug at all. You will have done so six times, on real processes.
#
# *You need* lesson 04 (owners, and a bug that raises no error) and lesson 06 (dp, tp and their groups).
#
# - *Previous:* [14 · What changes when ranks go from 32 to 16,384?](14_from_32_to_16384_ranks.ipynb)
# - *Next:* [16 · Does it survive my loop?](16_does_it_survive_my_loop.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 15` makes. It has
#   nothing to install.
#
# *Other grids:* dp of 2 or more; tp can be 2, 4, 8 or 16.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 3
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import inspect, os
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # PyTorch's flight recorder: on, before any rank starts
from muon_tutorial.learn import broken_runs as lesson
from muon_tutorial.learn.widgets.reveal import compare

# %% [markdown]
# ## The rank that complains did nothing wrong
#
# A real training run stands still. Each arrow goes from a rank that waits to the one it waits for. The red ones lead to
# rank 2: its data ran out one step early, and it left the loop without a word. All the error messages came from the
# others.
#
# This is the loop that we break. Each matrix has an owner along dp, which orthogonalizes it and shares its new rows.

# %%
print(inspect.getsource(lesson.TrainingRank.take_step))

# %% [markdown]
# In five phases of this loop ranks call each other, in this order: load, average, gather, share, log. (`gather` hides
# inside `self.update()`: an owner gathers whole inputs over tp.)
#
# Now a run that does not hang. From step 2 on, rank 1 has another learning rate. Where in step 2 does that show first:
# gradient, average, momentum, input, update or share? (Each is a *rung*.) And at the end, will all copies of the weights
# agree to the last bit?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
rung = ...  # such as "momentum"
agree = ...  # a bool

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# rung = "share"
# agree = True
# ```
#
# </details>

# %% tags=["ranks"]
hang = lesson.worked_hang(dp, tp, seed, backend)
lie = lesson.worked_lie(dp, tp, seed, backend)

# %%
lesson.guess().check(rung, agree)

# %% tags=["answer"]
print(lesson.say_outcome(lie))
compare({"rung": rung, "agree": agree}, lesson.outcomes(lie))

# %% [markdown]
# Agreement between ranks proves nothing. All copies of a matrix get their new rows from the same owner; if the owner is
# wrong, all are wrong alike.
#
# ## If it hangs: compare the calls
#
# `hang` is the run of the first picture, made anew. Look for the first call that some rank should have made, and did
# not. First, what a log would have shown; then the calls, where "…" means that a rank still waits.

# %% tags=["volatile"]
print(lesson.say_outcome(hang))

# %%
print(lesson.say_calls(hang, 3))
print(lesson.first_missing_call(hang))

# %% [markdown]
# The rank that complains first has only waited longest. The missing call tells who is to blame. And here is where they
# stand: the phase, as in `take_step`, and the innermost line of our code.

# %%
print(lesson.say_lines(hang))

# %% [markdown]
# In a run of your own, `py-spy dump --pid …` prints the same from outside. This is rank 3, recorded while the run stood
# still. Read from below.

# %%
print(lesson.recorded_dump())

# %% [markdown]
# PyTorch's **flight recorder** lists calls, too, if `TORCH_FR_BUFFER_SIZE` is set before the ranks start. Rank 0's
# last:
#
# <details><summary>What it does not know</summary>
#
# It was made for NCCL. On Gloo, torch 2.13 records kind, group, number and sizes, but not whether a call has ended.
#
# </details>

# %% tags=["volatile"]
print(lesson.say_flight(hang, rank=0, last=steps))

# %% [markdown]
# ## If it lies: a ladder, and an oracle to hold it against
#
# A run that lies makes all its calls, so comparing calls finds nothing. Instead, compare its numbers with the
# **oracle**: the same training in one process. Each result of a step is a rung, and the letters are a hash of all its
# bits. Here is `lie`, the run with another learning rate.

# %% tags=["volatile"]
lesson.draw_ladder(lie)

# %% [markdown]
# Read from the top. The *first* red rung counts; those below it have only inherited the mistake, and green below red
# repairs nothing. Compare hashes with each other, too: where two are equal, so are the entries. Should they be?
#
# <details><summary>How can a rung below red be green?</summary>
#
# Newton–Schulz works in bfloat16, and may round a wrong last bit away.
#
# </details>
#
# In words:

# %%
print(lesson.first_difference(lie))

# %% [markdown]
# The updates were right, and the weights after `share` are not: the fault is where the update is applied. Their owner,
# rank 1, has shared wrong rows.
#
# Size and cosine tell kinds apart. A forgotten factor changes the size and leaves the cosine at 1. Other data change
# both. If both are 1, with a difference near 10⁻⁷, the same entries were added up in another order: *no bug*.
#
# ## Play with it
#
# Pick a rank, a phase and a fault, and press play. A line joins ranks that have just called each other. How far does a
# wrong number get in one step? Who stands still after a skipped call?

# %%
lesson.explore_spread(dp, tp, live=widgets)

# %% [markdown]
# ## Six runs, five minutes each
#
# Now you. For each run find `(rank, phase, kind)`, such as `(1, "share", "another learning rate")`. Where all ranks
# make the same mistake, the rank is `"all"`.
#
# > *It hangs:* `say_calls(run, step)`, `draw_waits(run)`, `say_lines(run)`. Name the phase of the *missing call*.<br>
# > *It lies:* `draw_ladder(run)`, `say_numbers(run, step, rung)`, `say_packed(run, step, phase)`. Name the phase of the
# > *first rung that differs*.
#
# Two kinds look alike. What did the rank call *instead* of the missing call? If the one that comes next, it has
# *skipped* a call. If it jumped ahead, say from `load` to `log`, its *order* is another.
#
# <details><summary>Stuck?</summary>
#
# `first_missing_call` and `first_difference` from above do the search for you.
#
# </details>

# %%
print("phases: " + ", ".join(lesson.PHASES), lesson.say_kinds(), sep="\n\n")
clinic = lesson.open_clinic(dp, tp, seed, backend)

# %% [markdown]
# ### Run A
#
# `say_outcome` tells which tools fit.
#
# *Easy · 5 minutes · required*

# %% tags=["ranks"]
a = clinic.run("A")
print(lesson.say_outcome(a))

# %% tags=["stub"]
found_a = ...

# %%
clinic.check("A", found_a)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# One rank differs before the first step: its weights began elsewhere. At the end all copies agree.
#
# ```python
# found_a = (lesson.first_difference(a).who, "start", "another seed")
# ```
#
# </details>

# %% [markdown]
# ### Run B
#
# `draw_waits(b)` draws this one.
#
# <details><summary>Hint</summary>
#
# Does the guilty rank have gradients at all? `lesson.draw_ladder(b)` reads a run that hangs, too.
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["ranks", "volatile"]
b = clinic.run("B")
print(lesson.say_outcome(b))

# %%
lesson.draw_waits(b)

# %% tags=["stub"]
found_b = ...

# %%
clinic.check("B", found_b)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The gradients of one rank are None. So it left out `average` and went on to the call that follows.
#
# ```python
# found_b = (lesson.first_missing_call(b).rank, "average", "skipped call")
# ```
#
# </details>

# %% [markdown]
# ### Run C
#
# *Medium · 5 minutes · required*

# %% tags=["ranks"]
c = clinic.run("C")
print(lesson.say_outcome(c))

# %% tags=["stub"]
found_c = ...

# %%
clinic.check("C", found_c)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The cosine is 1 and the size is not, for tall matrices only: a factor that was taken from the rows at hand.
#
# ```python
# found_c = (lesson.first_difference(c).who, "update", "shard's shape")
# ```
#
# </details>

# %% [markdown]
# ### Run D
#
# *"Each blames another. Whom do I restart?"*
#
# *Medium · 5 minutes · required*

# %% tags=["ranks", "volatile"]
d = clinic.run("D")
print(lesson.say_outcome(d))

# %% tags=["stub"]
found_d = ...

# %%
clinic.check("D", found_d)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# One rank logs before it averages. Its gradients are there. Its group waits for it, and it waits for everybody.
#
# ```python
# found_d = (lesson.first_missing_call(d).rank, "average", "order of calls")
# ```
#
# </details>

# %% [markdown]
# ### Run E
#
# *"Other bits than last night. Which commit?"*
#
# *Medium · 5 minutes · required*

# %% tags=["ranks"]
e = clinic.run("E")
print(lesson.say_outcome(e))

# %% tags=["stub"]
found_e = ...

# %%
clinic.check("E", found_e)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Size 1, cosine 1, and a difference as large as rounding makes it. The batches were added up in another order. Look at
# the ladder of step 2, too: bfloat16 has rounded the difference away, and `update` and `share` are green again.
#
# ```python
# found_e = (lesson.first_difference(e).who, "gradient", "no bug")
# ```
#
# </details>

# %% [markdown]
# ### Run F
#
# *Medium · 5 minutes · required*

# %% tags=["ranks"]
f = clinic.run("F")
print(lesson.say_outcome(f))

# %% tags=["stub"]
found_f = ...

# %%
clinic.check("F", found_f)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The average is right, and the momentum has the hash of the step before: nobody wrote it back.
#
# ```python
# found_f = (lesson.first_difference(f).who, "momentum", "stale momentum")
# ```
#
# </details>

# %% [markdown]
# ## Two at once
#
# In run G one mistake hides another. Find the first, take it out by its kind, and run again:
# `clinic.run("G", repaired=["…"])`. Answer with a list of two findings.
#
# <details><summary>Hint</summary>
#
# If several ranks differ at the first rung, ask what each of them packed. `lesson.say_packed(g, step, phase)` prints
# it.
#
# </details>
#
# *Hard · 12 minutes · optional*

# %% tags=["ranks"]
g = clinic.run("G")
print(lesson.say_outcome(g))

# %% tags=["stub"]
found_g = ...

# %%
clinic.check("G", found_g)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The averages of one dp group differ in step 1: one rank packs in alphabetical order. Without that, the first
# difference is in step 2, on all ranks, and nobody has called `average` there: its hash is that of `gradient`.
#
# ```python
# odd = lesson.packs_otherwise(g, 1, "average")
# found_g = [(odd, "average", "order of parameters"), ("all", "average", "not averaged")]
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# - Agreement between ranks proves nothing. Keep an oracle.
# - In a hang, look for the first missing call. The rank that complains is a witness.
# - In a lie, the first rung that differs names the line.
# - Look at size and cosine first. Another order of a sum is no bug.
# - Repair one thing, then run again.
#
# **Quiz.** Answer with numbers. One line measures each.
#
# 1. `waiting`: how many ranks wait in the hanging run?
# 2. `agree`: do the lying run's copies agree at its end (1) or not (0)?
# 3. `step`: in which step does it first differ from the oracle?
#
# *Easy · 2 minutes · required*

# %%
quiz = lesson.quiz(hang, lie)

# %% tags=["stub"]
answers = {"waiting": ..., "agree": ..., "step": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# waiting = len({wait.waiter for wait in lesson.waits(hang)})
# agree_at_end, step = lesson.copies_agree(lie), lesson.first_difference(lie).step
# answers = {"waiting": waiting, "agree": int(agree_at_end), "step": step}
# ```
#
# </details>

# %% [markdown]
# You can find a fault in a run. The last lesson builds a run that survives one, with the optimizer that you have
# written.
