# %% [markdown]
# # 06 · Which ranks belong together?
#
# You are one rank in a grid. Which ranks do you call to average a gradient, and which to put a matrix together?

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
from muon_tutorial.learn import the_grid as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty-five minutes.** At the end you can say for any rank of any grid where it stands, which ranks are in its
# groups, and which number it has in each. Your own function has made all groups on real processes, and you have seen
# ranks wait in a group to which one member never came.
#
# *You need* lesson 03 (what a collective moves) and lesson 05 (a rank owns a range).
#
# - *Previous:* [05 · ZeRO-1 and the virtual buffer](05_zero1_and_the_virtual_buffer.ipynb)
# - *Next:* [07 · What do tp and dp cut?](07_what_tp_and_dp_cut.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 06` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* any.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 3
steps: int = 1
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from muon_tutorial import build_mesh, launch
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import the_grid as lesson, my_muon
from muon_tutorial.learn.the_grid import on_ranks as work
from muon_tutorial.learn.widgets.reveal import compare
guess, grouping, answering, comparing, quiz = lesson.all_exercises(dp, tp, backend)
mine = my_muon.so_far("06")

# %% [markdown]
# ## Every rank stands where a row and a column cross
#
# Along dp, ranks see different data; along tp, they hold different pieces of every matrix. Large models need both, so
# ranks stand in a grid. A rank's **coordinates** say where: dp goes down, tp goes right, and ranks are numbered row
# by row. Press a rank!

# %%
lesson.explore(dp, tp, live=widgets)

# %% [markdown]
# A **group** is a set of ranks that call a collective together. Every rank is in two: its row is its **tp group**,
# and its column is its **dp group**.
# Which ranks are in the groups of the *last* rank?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
dp_group = ...  # a list of ranks, such as [0, 1]
tp_group = ...

# %%
guess.check(dp_group, tp_group)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# dp_group = list(range(tp - 1, dp * tp, tp))
# tp_group = list(range(dp * tp - tp, dp * tp))
# ```
#
# </details>

# %% [markdown]
# ## All groups of any grid
#
# Write a function that lists all groups.
#
# <details><summary>Hint</summary>
#
# Ranks are numbered row by row. How far apart are neighbours in a row, and how far apart are neighbours in a column?
# `range` takes a step.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def groups(dp, tp):
    dp_groups = ...  # the ranks of each column: a list of lists
    tp_groups = ...  # the ranks of each row
    return ...  # dp_groups, tp_groups

# %%
grouping.check(groups)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The loops look as if they were exchanged: dp groups are columns, so there is one for each place along tp. Likewise
# there is one tp group for each place along dp.
#
# ```python
# def groups(dp, tp):
#     dp_groups = [list(range(tp_rank, dp * tp, tp)) for tp_rank in range(tp)]
#     tp_groups = [list(range(dp_rank * tp, dp_rank * tp + tp)) for dp_rank in range(dp)]
#     return dp_groups, tp_groups
# ```
#
# </details>

# %% [markdown]
# ## Who answers?
#
# Every rank runs your function with the list of *all* groups. In each group that contains this rank, the members
# gather each other's ranks, and your function returns what arrived. All ranks must *make* every group, members or
# not, but only members may *gather*.
#
# <details><summary>Hint</summary>
#
# One loop over all groups is enough. `new_group` stands in the loop itself, and everything else behind `if rank in
# ranks`. `found` needs a place for each member before the call, such as `[None] * n`.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def who_answers(rank, all_groups):
    # dist.new_group(ranks) makes a group that can talk
    # dist.all_gather_object(found, rank, group=group) fills a list `found` with what each member brought
    heard = ...  # for each of this rank's groups, the list of its members' answers
    return ...  # heard

# %%
answering.check(who_answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `new_group` stands outside the `if`. A rank that skips one call numbers all later groups differently from the
# others.
#
# ```python
# def who_answers(rank, all_groups):
#     heard = []
#     for ranks in all_groups:
#         group = dist.new_group(ranks)  # all ranks call, members or not
#         if rank in ranks:
#             found = [None] * len(ranks)
#             dist.all_gather_object(found, rank, group=group)
#             heard.append(found)
#     return heard
# ```
#
# </details>

# %%
groups = grouping.accepted_or(lesson.groups)
who_answers = answering.accepted_or(lesson.who_answers)
dp_groups, tp_groups = groups(dp, tp)
answers = launch(who_answers, dp * tp, args=([*dp_groups, *tp_groups],), backend=backend)
print(lesson.say_answers(answers))

# %% [markdown]
# PyTorch's **device mesh** makes all groups of a grid at once:
#
# <details><summary>More axes, and why tp comes last</summary>
#
# Big runs have more axes, such as pp, which cuts a model into stages of layers. Ranks are dealt out machine by
# machine, so neighbours along the last axis share a machine and its fastest links. tp, which talks in every layer,
# needs them most.
#
# </details>

# %%
def ask_the_mesh(rank):
    mesh = build_mesh({"dp": dp, "tp": tp})
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "tp")]

print("the same groups:", launch(ask_the_mesh, dp * tp, backend=backend) == answers)

# %% [markdown]
# ## Predict: which 1?
#
# A rank has one number in the world, its **global rank**, and one in each of its groups, its **group rank**. In each
# column, the member with group rank 1 should tell the others its global rank. `dist.broadcast` sends one member's
# tensor to all members, so suppose every rank calls it in its dp group, with `src=1`. What does the last rank get?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
arrives = ...  # a rank, such as 0, or "error"

# %% tags=["answer"]
def from_number_1(rank):
    column = build_mesh({"dp": dp, "tp": tp}).get_group("dp")
    mine = torch.tensor([rank])
    try:
        dist.broadcast(mine, src=1, group=column)
    except ValueError as error:
        return str(error)
    return int(mine)

arrived = launch(from_number_1, dp * tp, backend=backend)
print(lesson.say_arrivals(arrived))
compare({"arrives": arrives}, {"arrives": lesson.error_or_value(arrived[-1])})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# arrives = "error"  # global rank 1 is not in the last rank's column if tp is above 2
# ```
#
# </details>

# %% [markdown]
# `src` means the *global* rank, and `group_src` the group rank. With one axis the two are the same, so this bug shows
# only with a second.

# %%
def from_group_rank(rank, number):
    column = build_mesh({"dp": dp, "tp": tp}).get_group("dp")
    mine = torch.tensor([rank])
    dist.broadcast(mine, group_src=number, group=column)
    return int(mine)

print("each rank got:", launch(from_group_rank, dp * tp, args=(dp - 1,), backend=backend))

# %% [markdown]
# ## Predict: rank 0 skips a call
#
# In the picture at the top, each rank calls in its row, then in its column. Now rank 0 skips its first call. Which
# ranks get an answer to every call they make? (Rank 0 makes only one.)
#
# <details><summary>Hint</summary>
#
# A call returns once all members of that group have made it. Which ranks can then still come to their column?
#
# </details>
#
# *Medium · 3 minutes · required*

# %% tags=["stub", "predict"]
returned = ...  # a list of ranks, such as [1, 2]

# %%
def row_then_column(rank, skipper):
    mesh, known = build_mesh({"dp": dp, "tp": tp}, timeout=3), [rank]
    for axis in ("tp", "dp"):
        if axis == "tp" and rank == skipper:
            continue
        heard = [None] * mesh[axis].size()
        try:
            dist.all_gather_object(heard, known, group=mesh.get_group(axis))
        except RuntimeError:  # a member never came, and the 3 seconds are over
            return f"its {axis} group"
        known = sorted(set().union(*heard))
    return known

# %% tags=["answer"]
found = launch(row_then_column, dp * tp, args=(0,), backend=backend)
print(lesson.say_calls(found))
compare({"returned": returned}, {"returned": [r for r in range(dp * tp) if not isinstance(found[r], str)]})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Rank 0's row waits for it for ever, and every other column waits for its member of that row. Only in rank 0's own
# column does everybody come.
#
# ```python
# returned = list(range(0, dp * tp, tp)) if tp > 1 else list(range(dp))
# ```
#
# </details>

# %% [markdown]
# The rank that made the mistake sees no error!
#
# ## The same calls, in the same order
#
# Even *making* groups can go wrong like that: PyTorch assumes that the first call of `new_group` makes the same group
# on every rank, the second call too, and so on. So a rank with another order waits for ranks that never come. Given
# each rank's list of groups, which call is the first to differ?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def first_mismatch(lists):
    # lists[rank]: the groups that this rank is about to make, in order; lists may be of different lengths
    return ...  # the number, from 0, of the first call that differs, or None if all lists are the same

# %%
comparing.check(first_mismatch)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `zip(*lists)` would stop at the end of the shortest list, and miss a rank that makes one call too few.
#
# ```python
# def first_mismatch(lists):
#     for number in range(max(map(len, lists))):
#         calls = [wanted[number : number + 1] for wanted in lists]  # empty if the list has ended
#         if any(call != calls[0] for call in calls):
#             return number
#     return None
# ```
#
# </details>

# %% [markdown]
# `work.agree` does the same on real ranks: it gathers all ranks' lists in one collective, and compares them. Its
# message counts calls from 1:

# %%
def agree_first(rank):
    dp_groups, tp_groups = groups(dp, tp)
    wanted = [*dp_groups, *tp_groups]
    work.agree(wanted[::-1] if rank == 0 else wanted)

# %% tags=["raises-exception"]
try:
    launch(agree_first, dp * tp, backend=backend)
except RankFailedError as error:
    print(type(error.original).__name__, error.original, sep="\n")

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - `rank = dp_rank · tp + tp_rank`, and back again, `rank // tp` and `rank % tp`.
# - A row is a tp group, with different pieces. A column is a dp group, with the same piece and different data.
# - All ranks make all groups, in the same order. Compare their lists first.
# - Two calls reach all ranks. In the first, each rank learns what its row has. In the second, it tells its column.
# - A rank has a number in the world and one in each group. Ask which number a call wants.
# - A rank that skips a call returns without an error. Ranks that report a timeout only waited: they did
#   nothing wrong.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
measured = {
    "groups": ...,  # how many groups has this grid, rows and columns together?
    "number": ...,  # what is the group rank of the last rank in its tp group?
    "shared": ...,  # how many ranks are in both of rank 0's groups?
}

# %%
quiz.check(measured)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# in_both = set(answers[0][0]) & set(answers[0][1])
# measured = {"groups": sum(map(len, groups(dp, tp))), "number": (dp * tp - 1) % tp, "shared": len(in_both)}
# ```
#
# </details>

# %% [markdown]
# ## Your ring, in your groups
#
# `mine` is your `my_muon.py`. With its `ring_all_gather`, every dp group makes a ring of its own:

# %% tags=["ranks"]
mine.groups = grouping.accepted_or(mine.groups)  # your function of this page, if it has passed
rings = launch(work.ring_in_groups, dp * tp, args=(mine.groups(dp, tp)[0], mine.ring_all_gather), backend=backend)
print(*rings, sep="\n")

# %% [markdown]
# The next lesson asks what each axis cuts.
#
# *Read on:* [Megatron-LM, appendix B.1](https://arxiv.org/abs/1909.08053)
