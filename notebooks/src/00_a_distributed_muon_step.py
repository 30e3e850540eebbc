# %% [markdown]
# # 00 · What does a distributed Muon step look like?
#
# Kimi K2, a trillion-parameter model, was trained with Muon; in published runs, AdamW takes 1.1 to about 2 times as
# many steps as Muon to reach the same loss. But Muon needs whole matrices, so how do processes that hold only pieces
# take a step together, and end with the bits of a single process?

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
from muon_tutorial.learn import first_look as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Twenty minutes.** At the end you can say, for one matrix, which process holds which part before, during and after
# a Muon step, and have run it on real processes with your own function.
#
# *You need* Python, and an idea of what `optimizer.step()` does. No network, and no GPU: usually each process has a
# GPU of its own, but today all share your processor.
#
# - *Previous:* none, this is the first.
# - *Next:* [01 · Why orthogonalize a gradient?](01_why_orthogonalize.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 00` makes.
#
# *Other grids:* set `dp = 3` in the parameters below and run all cells again. Any dp and tp will do if your machine
# can start dp × tp processes.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import os
import torch
from muon_tutorial import Muon, build_mesh, launch
from muon_tutorial.learn import first_look as lesson
from muon_tutorial.learn.inputs import measure
plan = lesson.plan_of(dp, tp)
cut, keep, join, quiz = lesson.all_exercises(plan)

# %% [markdown]
# ## One matrix, many processes
#
# Unlike AdamW, the optimizer Muon **orthogonalizes** a matrix's update before applying it (see lesson 01), and for
# that it needs the whole matrix.
#
# A **process** is a running program whose memory no other process can read. Each of the processes that work together
# has a number, its **rank**, and is often called a rank itself.
#
# Ranks stand in a grid with two axes. Along **tp** (tensor parallel) the weight in the picture is *cut* into blocks
# of columns; along **dp** (data parallel) it is *copied*, and each copy sees different data. We write this **layout**
# as `W[I, J_tp]`: I rows, which no axis cuts, and J columns, which tp cuts. Along an axis missing from the brackets,
# here dp, ranks hold copies.
#
# `launch` runs your function in real processes:

# %% tags=["volatile"]
def greet(rank):
    return f"rank {rank} is process {os.getpid()}"

greetings, first_start = measure.timed(lambda: launch(greet, dp * tp, backend=backend))
print(f"this notebook is process {os.getpid()}", *greetings, sep="\n")

# %% [markdown]
# ## Your turn: cut
#
# A rank's place along tp is `rank % tp`, and along dp `rank // tp`. Replace the `...` by the columns that this rank
# holds.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def my_columns(matrix, rank):
    return ...  # matrix.chunk(n, dim=1) is a list: n pieces, side by side

# %%
cut.check(my_columns)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def my_columns(matrix, rank):
#     return matrix.chunk(tp, dim=1)[rank % tp]
# ```
#
# </details>

# %%
columns = cut.accepted_or(lambda matrix, rank: lesson.my_columns(matrix, rank, tp))

# %% [markdown]
# ## Cut again
#
# **Momentum**, a running average of past gradients, is as large as the weight. With **ZeRO** (zero redundancy), ranks
# along dp share it out instead of each keeping a copy. tp cuts the momentum like the weight. Each rank writes out its
# columns, row after row, as one flat list of B entries, and dp cuts this list into equal parts: `m[B_dp]` (lower case
# for a flat list, upper case for a matrix). Which entries does a rank keep?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def my_momentum(matrix, rank):
    mine = columns(matrix, rank).flatten()  # row after row
    return ...

# %%
keep.check(my_momentum)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Flatten first. Then dp cuts the flat list, so a part may end in the middle of a row. `mine.chunk(dp)` without
# `flatten()` would cut between rows only.
#
# ```python
# def my_momentum(matrix, rank):
#     mine = columns(matrix, rank).flatten()  # row after row
#     return mine.chunk(dp)[rank // tp]
# ```
#
# </details>

# %%
lesson.picture_of_momentum(plan)

# %% [markdown]
# ## Take the step
#
# All ranks **must call** `step()`, because in it they average gradients along dp, exchange pieces, and wait for each
# other.

# %%
def one_step(rank):
    parameter = torch.nn.Parameter(columns(lesson.weight(seed), rank).clone())
    grid = build_mesh({"dp": dp, "tp": tp})
    muon = Muon([parameter], lr=0.1, strategy="zero1", mesh=grid, tp_dim=1)  # tp cuts columns
    before = parameter.detach().clone()
    parameter.grad = columns(lesson.local_gradient(seed, rank // tp), rank).clone()
    muon.step()
    return lesson.WeightReport(before, muon.state[parameter]["momentum_buffer"], parameter.detach())

reports = launch(one_step, dp * tp, backend=backend)

# %% [markdown]
# Are the ranks faster than one process?

# %% tags=["volatile"]
costs = launch(lesson.cost_of_steps, dp * tp, args=(dp, tp, seed, steps), backend=backend)
[alone_seconds] = launch(lesson.cost_alone, 1, args=(seed, steps))
print(lesson.say_cost(costs, alone_seconds, first_start))

# %% [markdown]
# In one process, PyTorch's own Muon gets the whole matrix and the mean gradient:

# %%
alone = torch.nn.Parameter(lesson.weight(seed))
alone.grad = lesson.mean_gradient(seed, dp)
torch.optim.Muon([alone], lr=0.1).step()

# %% [markdown]
# To compare both, put the ranks' columns together.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def whole(pieces):
    return ...  # pieces[rank]: a rank's columns; torch.cat(list, dim=1) puts a list of pieces side by side

# %%
join.check(whole)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Together, ranks 0 to tp − 1, at dp's first place, hold all columns. All later ranks hold copies, so leave
# them out.
#
# ```python
# def whole(pieces):
#     return torch.cat(pieces[:tp], dim=1)
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Here tp *cuts* the weight and dp *copies* it. With ZeRO, dp cuts the momentum as well.
# - For so small a matrix one process is faster by far. More ranks pay off once matrices are large, or no longer fit
#   into one memory.
#
# </details>
#
# **Quiz.**
#
# *Easy · 1 minute · required*

# %% tags=["stub"]
answers = {
    "copies": ...,  # if dp were larger by 1, how many ranks would hold the weight's first column?
    "kept": ...,  # how many entries of the momentum does rank 0 keep? Ask reports[0].momentum.
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answers = {"copies": dp + 1, "kept": reports[0].momentum.numel()}
# ```
#
# </details>

# %% [markdown]
# ## The same bits?

# %%
whole = join.accepted_or(lambda pieces: torch.cat(pieces[:tp], dim=1))
print("the same bits:", torch.equal(whole([report.after for report in reports]), alone.detach()))

# %% [markdown]
# During the step each rank had the whole matrix for a moment: `X[I, J]` (X: what Muon orthogonalizes). In this
# replay, colours say which rank keeps a piece, and equal letters mean equal bytes.

# %%
lesson.play_step(plan, reports, alone.detach(), live=widgets)

# %% [markdown]
# The next lesson asks why Muon orthogonalizes a gradient at all.
#
# *Read on:* [Kimi K2, section 2.1](https://arxiv.org/abs/2507.20534)
