# %% [markdown]
# # 06 · The 2-D grid, and what TP cuts
#
# **Thirty minutes.** At the end you can say, for any rank, who holds the same numbers as it does, who
# holds the rest of a matrix, and which piece is its own. And your own function has made the groups of a grid
# on real processes.
#
# *You need* lesson 03 (what a collective moves) and lesson 05 (a rank owns a range). No knowledge of tensor
# parallelism.
#
# - *Previous:* [05 · ZeRO-1 and the virtual buffer](05_zero1_and_the_virtual_buffer.ipynb)
# - *Next:* [08 · What happens if each shard is orthogonalized alone?](08_each_shard_alone.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 06` makes. It has
#   nothing to install.

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% tags=["parameters"]
dp: int = 2
tp: int = 3
steps: int = 3
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import torch
import torch.distributed as dist
from muon_tutorial import Muon, build_mesh, launch
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn.the_grid import on_ranks as work
from muon_tutorial.learn import the_grid as lesson

# %% [markdown]
# ## Every rank stands where a row and a column cross
#
# There are two reasons to use many ranks. There is more data than one can read in time: with dp (data
# parallel), each gets its own share of the data. And a matrix may be too large for one: with tp (tensor
# parallel), each gets a piece of it. Large models need both. So ranks stand in a grid, dp downwards and tp to
# the right.
#
# Beside the grid is one Linear layer, y = x Wᵀ: inputs x, one example a row; the weight W; outputs y. There
# are two ways to cut it. A colour is a place along tp: the first is tp 0. Press a rank, then the other
# cut.

# %%
guess, grouping, shapes, quiz = lesson.all_exercises(dp, tp)
lesson.explore(dp, tp, live=widgets)

# %% [markdown]
# Three things to see:
#
# 1. *Ranks are counted along the rows:* rank = dp place × tp + tp place. Back again: `rank // tp` is its place
#    along dp, and `rank % tp` its place along tp.
# 2. *Along a row* the colours differ. These ranks hold different pieces, which make one whole matrix. They
# are the rank's **tp group**: in it, tp changes.
# 3. *Along a column* the colours are the same. These ranks hold the same piece, and see different data. They
# are the rank's **dp group**: in it, dp changes.
#
# A **group** is a set of ranks that call a collective together. Muon needs both: it averages gradients over
# the dp group, and puts a matrix together over the tp group.
#
# ## Predict
#
# The last rank stands in the lower right corner. Which ranks are in its dp group, which in its tp group? Its
# own number belongs to both.
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
# Its column: every tp-th rank, from tp − 1 on. Its row: the last tp ranks.
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
# Write a function that lists all of them. `dp_groups` has one list of ranks for each column, `tp_groups` one
# for each row.
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def groups(dp, tp):
    dp_groups = ...
    tp_groups = ...
    return ...  # dp_groups, tp_groups

# %% [markdown]
# Here are your groups on the grid. Each fill is one group. A rank in no group, or in several, is crossed out.

# %%
lesson.picture_of_groups(groups, dp, tp)

# %%
grouping.check(groups)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def groups(dp, tp):
#     dp_groups = [list(range(place, dp * tp, tp)) for place in range(tp)]
#     tp_groups = [list(range(place * tp, place * tp + tp)) for place in range(dp)]
#     return dp_groups, tp_groups
# ```
#
# </details>

# %% [markdown]
# ## Who answers?
#
# Now on real processes. `dist.new_group(ranks)` makes a group. Then each rank sends its number to the groups
# that it is in, with `all_gather_object`, and hears who else is there. Note what is *not* under the `if`.

# %%
groups = grouping.accepted_or(lesson.groups)
def who_answers(rank):
    dp_groups, tp_groups = groups(dp, tp)
    answers = []
    for ranks in [*dp_groups, *tp_groups]:
        group = dist.new_group(ranks)  # all ranks call, members or not
        if rank in ranks:
            heard = [None] * len(ranks)
            dist.all_gather_object(heard, rank, group=group)
            answers.append(heard)
    return answers

# %%
answers = launch(who_answers, dp * tp, backend=backend)
print(lesson.say_answers(answers))

# %% [markdown]
# Every rank is in one column and in one row, and they have only this rank in common.
#
# You will seldom make groups by hand. PyTorch's **device mesh** makes all of a grid at once; `build_mesh` is
# this package's way to call it. Does it make the same groups?

# %%
def ask_the_mesh(rank):
    mesh = build_mesh({"dp": dp, "tp": tp})
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "tp")]

print("the same groups:", launch(ask_the_mesh, dp * tp, backend=backend) == answers)

# %% [markdown]
# ## All must call, in the same order
#
# Why must ranks call `new_group` that are not in the group? Because a group has a number, and each rank finds
# it by counting its own calls. Members meet under that number. A rank that skips a call, or makes its calls
# in another order, waits under a number where nobody comes.
#
# Try it. Rank 0 wants the same groups, but begins with the last.

# %%
def wanted_by(rank):
    dp_groups, tp_groups = groups(dp, tp)
    wanted = [*dp_groups, *tp_groups]
    return wanted[::-1] if rank == 0 else wanted

def make_groups(rank):
    for ranks in wanted_by(rank):
        dist.new_group(ranks)

# %% tags=["volatile", "raises-exception"]
try:
    launch(make_groups, dp * tp, backend=backend, timeout=1.5)
except RankFailedError as error:
    print(lesson.say_failure(error))

# %% [markdown]
# "No rank failed by itself": each waits for somebody who waits elsewhere. (On some grids a few get through: they
# "had returned".) Which rank is named first is chance, and nothing says what the fault is. It ended soon,
# because `launch` lets a rank wait for 1.5 seconds here. By itself, PyTorch lets it wait for half an hour.
#
# It is better to compare first. `work.agree` sends each rank's list to all, and every rank looks for the
# first difference. That takes one collective over all ranks, once, and it tells you what to mend.

# %%
def agree_then_make(rank):
    work.agree(wanted_by(rank))
    make_groups(rank)

# %% tags=["raises-exception"]
try:
    launch(agree_then_make, dp * tp, backend=backend)
except RankFailedError as error:
    print(type(error.original).__name__, error.original, sep="\n")

# %% [markdown]
# The package's optimizer does so with its whole plan, before the first step.
#
# ## What tp cuts
#
# Look at the picture at the top again. A Linear with `in` inputs and `out` outputs keeps its weight as a
# matrix of shape `(out, in)`, and calculates y = x Wᵀ.
#
# - **Column parallel:** each place makes *some of the outputs*. It needs the rows of W that belong to them.
# So it is dimension 0 that is cut.
# - **Row parallel:** each place takes *some of the inputs*. It needs the columns of W that belong to them. So
# it is dimension 1 that is cut.
#
# Yes, column parallel cuts rows. The names come from papers, which write y = x A. Their A is Wᵀ: its columns
# are the rows of W. Everybody mixes this up at least once. The safe question is: outputs, or inputs?
#
# (None of this has to do with rows and columns of the *grid*.)
#
# ## Find the shape of a piece
#
# tp need not divide the size. Cut as `torch.chunk` does: each place gets n / tp, rounded up, until nothing is
# left. Then the last ones get less, or nothing.
#
# Your function gets the shape of the whole weight; `kind`, which is `"column"` or `"row"`; the `place` along
# tp, from 0; and tp. Return the shape of the piece.
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def local_shape(shape, kind, place, tp):
    out, into = shape
    return ...  # a pair (rows, columns)

# %%
shapes.check(local_shape)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def local_shape(shape, kind, place, tp):
#     out, into = shape
#     n = out if kind == "column" else into
#     step = -(-n // tp)  # rounded up
#     mine = max(0, min(step, n - step * place))
#     return (mine, into) if kind == "column" else (out, mine)
# ```
#
# </details>

# %% [markdown]
# ## Cut, and still the same answer
#
# One after the other, both cuts fit together. Take two layers: `up`, 10 × 8, makes 10 hidden numbers of 8
# inputs; `down`, 6 × 10, makes 6 outputs of them. `up` is column parallel: each place makes some of the
# hidden numbers. They are finished, so the relu can come at once. And just those are the inputs that its
# piece of `down`, row parallel, needs: no message in between. Only at the end each place has a part of every
# sum, and one all_reduce over the tp group adds the parts up.
#
# `work.cut` takes its lengths from your function, if it has passed.

# %%
shape_of = shapes.accepted_or(lesson.local_shape)
def both_layers(rank, given):
    tp_group = build_mesh({"dp": dp, "tp": tp}).get_group("tp")
    up = work.cut(given.up, "column", rank % tp, tp, shape_of)
    down = work.cut(given.down, "row", rank % tp, tp, shape_of)
    hidden = torch.relu(given.batches[rank // tp] @ up.T)
    y = hidden @ down.T
    dist.all_reduce(y, group=tp_group)
    return y

# %% [markdown]
# Each row of the grid has its own batch of data. Below, one process alone does the same with the whole
# weights. Once with random numbers of the ordinary kind, once with small whole numbers.

# %%
for kind in ("ordinary", "whole"):
    given = work.make_numbers(kind, dp, seed)
    outputs = launch(both_layers, dp * tp, args=(given,), backend=backend)
    alone = [torch.relu(batch @ given.up.T) @ given.down.T for batch in given.batches]
    print(lesson.say_outputs(kind, outputs, alone, tp))

# %% [markdown]
# The same output. But with ordinary numbers and a tp above 1, not the same bits: the ranks add in another
# order, and each addition is rounded. Small whole numbers need no rounding, and every bit is the same. So it
# is only rounding; nothing is lost or counted twice.
#
# ## What dp cuts
#
# dp does not cut a matrix. The weights are there in every row of the grid, as copies. What dp cuts is what
# nobody needs as a copy: the momentum, as in lesson 05. And it does not ask where a matrix begins.
#
# So both cuts meet, one inside the other. For each place along tp there is one flat buffer, with the pieces
# of that place. And dp cuts each such buffer into equal slices.

# %%
lesson.picture_of_buffers(dp, tp)

# %% [markdown]
# (Where a place holds less of a matrix than others, its buffer is filled up with padding, hatched. So all
# buffers have the same layout, and the ranks of one row keep the same stretch of them.)
#
# Now train on real ranks, with gradients that differ in every row of the grid. `work.my_parameters` cuts `up`
# and `down`, and notes on each piece how it was cut: Muon must know.

# %%
def train(rank):
    weights = work.my_parameters(rank, tp, seed)
    optimizer = Muon(weights, strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}))
    for step in range(steps):
        work.fill_gradients(weights, rank, tp, step)
        optimizer.step()
    return work.kept_by(optimizer)

# %%
kept = launch(train, dp * tp, backend=backend)
print(lesson.say_kept(kept, tp))

# %% [markdown]
# A letter stands for the bytes of a piece. After all those steps, with other data in every row, the letters
# still repeat along dp: the step made the copies the same again, to the bit. The momentum is nowhere twice.
# Here is `up`, from the same run, with the same letters. In this picture a colour is a rank.

# %%
lesson.picture_of_kept(lesson.plan_of(dp, tp), kept)

# %% [markdown]
# This is why a Muon step needs two gathers. One over the dp group joins the slices of a buffer; one over the
# tp group joins the pieces of a matrix. What happens if you leave out the second is the next lesson.
#
# ## A trap: three matrices in one
#
# Attention needs three matrices, q, k and v. Many models keep them in one, q above k above v, to multiply
# once. *(Optional.)* What does each place get if tp cuts that one as any other?

# %%
print(lesson.say_fused(tp))

# %% [markdown]
# <details><summary>Why this is a trap</summary>
#
# The shapes are right, and no error is raised. But to attend, a place needs q, k and v *of the same heads*.
# So the cut must go through each of the three: models cut q, k and v apart, and pack what a place gets.
#
# Then a whole weight that is gathered piece by piece is no longer q above k above v. And Muon should
# orthogonalize q, k and v each by itself. Code that looks for them in a piece, by its number of rows, goes
# wrong without an error: pull request 7117 of NVIDIA/Megatron-LM mended such a case, where a shard took
# another path than the whole.
#
# </details>

# %% [markdown]
# ## Recap
#
# - Every rank is in one row of the grid, its tp group, and in one column, its dp group.
# - All ranks make all groups, in the same order.
# - tp cuts a *matrix*. Column parallel cuts outputs: dimension 0 of a Linear's weight. Row parallel cuts
# inputs: dimension 1.
# - dp copies the weights, and cuts the *buffer* of the momentum.
#
# **Quiz.** Answer with numbers, for `dp` and `tp` as above. You can measure each of them with one line above.
#
# 1. `groups`: how many groups has the grid, dp groups and tp groups together?
# 2. `rows`: how many rows of `up`, 10 × 8 and column parallel, does the last place along tp hold?
# 3. `kept`: how many numbers of momentum does rank 0 keep?

# %% tags=["stub"]
answers = {"groups": ..., "rows": ..., "kept": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# rows = shape_of((10, 8), "column", tp - 1, tp)[0]
# answers = {"groups": sum(map(len, groups(dp, tp))), "rows": rows, "kept": kept[0].numbers}
# ```
#
# </details>
