# %% [markdown]
# # 15 · It hangs, or lies. Which rank, which line?
#
# Your training stands still, or it runs and learns the wrong thing. Which rank is at fault, and which line?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
# Set-up: installs nothing where the package is installed, and draws the first picture.
import importlib.util, pathlib, subprocess, sys
if importlib.util.find_spec("muon_tutorial") is None:  # look here and in the repository's root; do not touch the installed torch
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
# **Ninety minutes.** The optional exercises take twenty-four more. At the end you can find the wrong line of a
# broken distributed run within a few minutes, repair it, and prove that it was the one. You can also say when a
# difference is no bug at all. You will have practised on real processes, with a log, a stack, a flight record and the
# file. A good place to stop is before *Now you*. When you come back, run all cells above it again.
#
# *You need* lesson 04 (owners, and a bug that raises no error) and lesson 06 (dp, tp and their groups).
#
# - *Previous:* [14 · What changes when ranks go from 32 to 16,384?](14_from_32_to_16384_ranks.ipynb)
# - *Next:* [16 · Does it survive my loop?](16_does_it_survive_my_loop.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 15` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
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
import os
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # PyTorch's flight recorder: on, before any rank starts
import torch
from muon_tutorial.learn import broken_runs as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
matching, accusing, searching = lesson.write_waits(), lesson.write_suspects(), lesson.write_search()
_ = my_muon.so_far("15")

# %% [markdown]
# ## The rank that complains did nothing wrong
#
# In the picture, rank 2 left the loop a step early. The others waited for it, and all error
# messages came from them.
#
# You will repair broken runs of this training loop, in which each matrix has an owner along dp:

# %%
clinic = lesson.open_clinic(dp, tp, seed, backend)
print(clinic.read("hang", "take_step"))

# %% [markdown]
# A step makes these calls, along tp, dp or both:
#
# ```text
# load     tp   makes weights whole
# average  dp
# gather   tp   makes matrices whole, in `update`
# share    dp   each owner updates its weights with lr, and sends them
# log      both
# ```
#
# A second run ends, but in it rank 1 uses another learning rate from step 2 on. A step has six results, from
# `gradient` to `share`, the *rungs* of a ladder; `input` is what Newton–Schulz gets. Which rung is wrong first in
# step 2? And when the run ends, do all copies of the weights agree?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
rung = ...  # "gradient", "average", "momentum", "input", "update" or "share"
agree = ...  # a bool

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A step uses its learning rate only when an owner updates its weights, so all rungs before `share` are still right. Then
# the owner sends these weights to its dp group, in which all ranks now have the same wrong ones.
#
# ```python
# rung = "share"
# agree = True
# ```
#
# </details>

# %% tags=["ranks"]
hang = clinic.run("hang")
lie = clinic.run("lie")

# %%
lesson.guess().check(rung, agree)

# %% tags=["answer"]
print(lesson.say_outcome(lie))
compare({"rung": rung, "agree": agree}, lesson.outcomes(lie))

# %% [markdown]
# All copies agree, because they come from the same owner.
#
# ## If it hangs: compare the calls
#
# The picture's run, on your machine:

# %% tags=["volatile"]
print(lesson.say_outcome(hang))

# %% [markdown]
# The stack of rank 3, which waited:

# %% tags=["volatile"]
print(hang.reports[3].stack)

# %% [markdown]
# While your own run hangs, `py-spy dump --pid …` shows such a stack, to be read from the bottom up:

# %%
print(lesson.recorded_dump())

# %% [markdown]
# To find the missing rank, you need the calls of all ranks. PyTorch's **flight recorder** keeps them. Here are rank
# 0's last ones:
#
# <details><summary>How to switch it on, and what it does not know</summary>
#
# Set `TORCH_FR_BUFFER_SIZE` before the ranks start. The flight recorder was made for NCCL. With Gloo, torch 2.13
# records the kind of call, its group, its number and its sizes, but not whether it has ended.
#
# </details>

# %% tags=["volatile"]
print(lesson.say_flight(hang, rank=0, last=steps))

# %% [markdown]
# Our loop also notes the calls that each rank has begun. Take a rank's last call, say its third `load`: it waits for
# each rank of that group that has begun fewer than three. Find all pairs of a waiting rank and a rank that it waits
# for.
#
# <details><summary>Hint</summary>
#
# `log[-1]` is a rank's last call, and `log[-1][1]` are the ranks that must make it. `log.count(call)` says how often a
# rank has begun a call.
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def waits(logs):
    # logs[rank]: a rank's calls in order; ("load", (2, 3)) is a load that ranks 2 and 3 must make
    return ...  # pairs, as a list or a set: (rank that waits, rank that it waits for)

# %%
matching.check(waits)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `in` is not enough in place of `count`: a rank has the same call in its log from every earlier step.
#
# ```python
# def waits(logs):
#     pairs = []
#     for rank, log in enumerate(logs):
#         for other in log[-1][1]:
#             if logs[other].count(log[-1]) < log.count(log[-1]):
#                 pairs.append((rank, other))
#     return pairs
# ```
#
# </details>

# %%
waits = matching.accepted_or(lesson.waiting_pairs)
print(waits(lesson.logs(hang)))

# %% [markdown]
# Others wait for the rank at fault, but a rank that has left the loop waits for no other. Which ranks fit both?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def suspects(pairs):
    return ...  # ranks, as a list or a set; pairs: what waits returns

# %%
accusing.check(suspects)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A rank that is itself waiting may just be held up by another. So among the ranks that others wait for, suspect only
# those that do not wait.
#
# ```python
# def suspects(pairs):
#     waiting = {rank for rank, _ in pairs}
#     return {other for _, other in pairs} - waiting
# ```
#
# </details>

# %%
suspects = accusing.accepted_or(lesson.suspects)
print(suspects(waits(lesson.logs(hang))))
print(lesson.say_calls(hang, 3))

# %% [markdown]
# ("…" marks a call that has not returned.) In step 3, rank 2 has not even begun `load`, so open the file where the
# steps begin:

# %%
print(clinic.read("hang", "train"))

# %% [markdown]
# Repair it.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
repair_hang = ...  # {number of a line: "the new line"}; it gets the indentation of the old one

# %%
clinic.check("hang", repair_hang)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# On rank 2, the loop in line 10 ends one step early.
#
# ```python
# repair_hang = {10: "for self.step in range(1, steps + 1):"}
# ```
#
# </details>

# %% [markdown]
# ## If it lies: a ladder, held against an oracle
#
# A run that lies makes all its calls, so compare its numbers with an **oracle**, the same training in one process.
# Only the *first* wrong rung counts, because everything below it comes from wrong numbers. Find it.
#
# <details><summary>Hint</summary>
#
# Go down the ladder, and ask all ranks at each rung. `torch.equal` compares all bits, and every matrix has to be equal.
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def first_wrong(run):
    # lesson.LADDER: pairs (step, rung), from the top down; run.reports: one for each rank
    # run.reports[rank].notes.rungs[step, rung], run.expected(rank)[step, rung]: dictionaries of matrices
    return ...  # (step, rung, lowest wrong rank), or None if all is right

# %%
searching.check(first_wrong)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The ladder is the outer loop. With the ranks outside, you would get the first wrong rung of the lowest wrong rank,
# and another rank may have gone wrong before it.
#
# ```python
# def first_wrong(run):
#     for step, rung in lesson.LADDER:
#         for rank, report in enumerate(run.reports):
#             mine, right = report.notes.rungs[step, rung], run.expected(rank)[step, rung]
#             if not all(torch.equal(mine[name], right[name]) for name in right):
#                 return step, rung, rank
#     return None
# ```
#
# </details>

# %% tags=["volatile"]
print(searching.accepted_or(lesson.first_wrong)(lie))
lesson.draw_ladder(lie)

# %% [markdown]
# <details><summary>How to read the ladder</summary>
#
# The letters are a hash of all bits, and `start` means the first weights. A rung below a red one can be green,
# because Newton–Schulz works in bfloat16, which may round a wrong last bit away.
#
# </details>
#
# By how much are the weights after `share` wrong?

# %%
print(lesson.say_numbers(lie, 2, "share"))

# %% [markdown]
# The columns tell you the kind of mistake: `size` is a norm divided by the oracle's, `cosine` compares with the
# oracle's numbers, and `difference` is the largest difference of two entries, divided by the oracle's largest entry.
# A forgotten factor changes an update's size, but not its cosine. Other data, another seed, or an earlier wrong step
# change both. A wrong lr, as here, shows only in the *weights* (rung `share`). They are mostly old weights, which are
# right, so both change only a little. If size and cosine are both 1 and the difference is near 10⁻⁷, entries were
# added in another order: *no bug*. This method makes the wrong weights:

# %%
print(clinic.read("lie", "share"))

# %% [markdown]
# Repair it, too.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
repair_lie = ...  # "" as a new line deletes the old one

# %%
clinic.check("lie", repair_lie)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Lines 84 and 85 halve the learning rate of rank 1 alone. Without them all owners have the same rate, as in the oracle.
#
# ```python
# repair_lie = {84: "", 85: ""}
# ```
#
# </details>

# %% [markdown]
# ## Now you
#
# Repair each file, or answer `"nothing"` if no line is wrong. Your tools:
#
# ```text
# ranks gave up waiting   suspects(waits(lesson.logs(run)))   lesson.say_calls(run, step)
#                         lesson.draw_waits(run)              lesson.say_stacks(run)
#                         lesson.say_flight(run, rank)
# all ranks returned      lesson.draw_ladder(run)             lesson.say_numbers(run, step, rung)
# the file                clinic.read("A")                    clinic.read("A", "momentum")
# ```
#
# ### File A
#
# *"All copies agree at the end. The loss is not the one that we had on a single GPU."*
#
# <details><summary>Hint</summary>
#
# Which is the highest red rung in the ladder, and on which ranks? (The row `start`, above step 1, compares the
# weights before any step.) `clinic.read("A")` shows the whole file: which method makes these numbers?
#
# </details>
#
# *Easy · 6 minutes · required*

# %% tags=["ranks"]
a = clinic.run("A")
print(lesson.say_outcome(a))

# %% tags=["stub"]
repair_a = ...  # {number of a line: "the new line"}, or "nothing"

# %%
clinic.check("A", repair_a)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# All ranks but one differ from the oracle before the first step, so they began with other weights.
#
# ```python
# repair_a = {6: "return self.seed"}
# ```
#
# </details>

# %% [markdown]
# ### File B
#
# *"It ran for two steps. Now all ranks wait, and each blames another."*
#
# <details><summary>Hint</summary>
#
# Print the calls of step 3. Here a skipped call looks like calls in a wrong order. So which call did ranks make
# *instead* of the missing one? If they made the next call of the program, they skipped one.
#
# </details>
#
# <details><summary>Another hint</summary>
#
# The method can return before it makes the missing call. Can one rank return there while another does not?
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["ranks", "volatile"]
b = clinic.run("B")
print(lesson.say_outcome(b))

# %%
lesson.draw_waits(b)

# %% tags=["stub"]
repair_b = ...

# %%
clinic.check("B", repair_b)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The ranks of one place along dp found their own loss low enough and left `average` without its call, so the others in
# their dp groups wait for them there. Whether a call is made must never depend on what one rank alone knows.
#
# ```python
# repair_b = {43: "", 44: "", 45: ""}
# ```
#
# </details>

# %% [markdown]
# ### File C
#
# *"With tp = 1 it was right to the bit."*
#
# <details><summary>Hint</summary>
#
# Look at size and cosine at the first red rung, matrix by matrix. What do the matrices with the wrong size have in
# common?
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["ranks"]
c = clinic.run("C")
print(lesson.say_outcome(c))

# %% tags=["stub"]
repair_c = ...

# %%
clinic.check("C", repair_c)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The cosine is always 1, but for the tall matrices the size is not. So a factor that depends on the shape is wrong.
# The code took it from the rows that tp left on this rank, and it belongs to the whole matrix (lesson 08).
#
# ```python
# repair_c = {80: "return rescale(SHAPES[name])"}
# ```
#
# </details>

# %% [markdown]
# ### File D
#
# *"Each blames another. Which one do I restart?"*
#
# <details><summary>Hint</summary>
#
# In the calls of step 1, some ranks are in a call that is not due yet. Follow the program from the last call that all
# ranks have made.
#
# </details>
#
# *Medium · 6 minutes · optional*

# %% tags=["ranks", "volatile"]
d = clinic.run("D")
print(lesson.say_outcome(d))

# %% tags=["stub"]
repair_d = ...

# %%
clinic.check("D", repair_d)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Some ranks log before they average. Their dp groups wait for them in `average`, and they wait for everybody in
# `log`. They wait in a circle, so restarting any one rank would not help.
#
# ```python
# repair_d = {40: "", 41: ""}
# ```
#
# </details>

# %% [markdown]
# ### File E
#
# *"Other bits than last night. Which commit was it?"*
#
# <details><summary>Hint</summary>
#
# How large is the difference at the first red rung, compared with what one addition in float32 rounds away?
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["ranks"]
e = clinic.run("E")
print(lesson.say_outcome(e))

# %% tags=["stub"]
repair_e = ...

# %%
clinic.check("E", repair_e)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Size and cosine are 1, and the difference is as large as rounding makes it: the batches were added up in another
# order. In the ladder, `update` and `share` are green, because bfloat16 has rounded the difference away.
#
# ```python
# repair_e = "nothing"
# ```
#
# </details>

# %% [markdown]
# ### File F
#
# *"It learns as if it had no momentum."*
#
# <details><summary>Hint</summary>
#
# Compare the hashes of `momentum` in steps 1, 2 and 3 of one rank.
#
# </details>
#
# *Medium · 6 minutes · optional*

# %% tags=["ranks"]
f = clinic.run("F")
print(lesson.say_outcome(f))

# %% tags=["stub"]
repair_f = ...

# %%
clinic.check("F", repair_f)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The averages are right and the momentum stays what it was: zero. In PyTorch, `mul` and `add` return a new tensor,
# and only `mul_` and `add_` change the one at hand.
#
# ```python
# repair_f = {52: "self.memory[name].mul_(MEMORY).add_((1 - MEMORY) * mean)"}
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Agreement between ranks proves nothing. Keep an oracle, and compare with it to the bit.
# - If a run hangs, look for the first call that is missing. The rank that complains is only a witness.
# - If a run lies, the first rung that differs tells you which method is wrong, and size and cosine tell you the kind of mistake.
# - A sum in another order is no bug.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %%
quiz = lesson.quiz(hang, lie)

# %% tags=["stub"]
answers = {
    "waiting": ...,  # how many ranks waited in the hanging run until they gave up?
    "agree": ...,  # do the lying run's copies agree at its end (1) or not (0)?
    "step": ...,  # in which step does it first differ from the oracle?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Rank 2 has left the loop. Its tp and dp neighbours wait for it, and the others wait for them, so all but rank 2 give up
# in the end. The lying run's copies agree, because a dp group gets each matrix from one owner. Up to step 2 that run is
# right, and there rank 1's learning rate changes.
#
# ```python
# answers = {"waiting": dp * tp - 1, "agree": 1, "step": 2}
# ```
#
# </details>

# %% [markdown]
# ## Two at once
#
# In file G one mistake hides another. Repair the first. `check` then draws the ladder of your repaired run: find the
# second there, and answer with both.
#
# <details><summary>Hint</summary>
#
# The first red rung has numbers that belong to other matrices. In which order does each rank pack them, and is it the
# same order everywhere?
#
# </details>
#
# <details><summary>Another hint</summary>
#
# The second shows in `share`. In lesson 06, a call said `src=1` and meant another rank.
#
# </details>
#
# *Hard · 12 minutes · optional*

# %% tags=["ranks"]
g = clinic.run("G")
print(lesson.say_outcome(g))

# %% tags=["stub"]
repair_g = ...

# %%
clinic.check("G", repair_g)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Each rank sorts its matrices by the norms of its *own* gradients, so ranks may pack in different orders, and
# their sum then adds one matrix to another. With that repaired, `share` is the first red rung: place 0 broadcasts
# every matrix, and it owns only some of them.
#
# ```python
# repair_g = {
#     43: "order = list(self.gradients)",
#     90: "dist.broadcast(flat, group_src=place, group=group)",
# }
# ```
#
# </details>

# %% [markdown]
# You can repair a broken run, but the last lesson asks: does yours survive a rank's death?
#
# *Read on:* [OPT-175B's logbook](https://github.com/facebookresearch/metaseq/tree/main/projects/OPT/chronicles)
