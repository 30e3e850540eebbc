# %% [markdown]
# # 00 · What does a distributed Muon step look like?
#
# **Five minutes.** At the end you can say, for one matrix, which process holds which part of it before,
# during and after a Muon step. And you have run that step on real processes, with a function of your own.
#
# *You need* Python, and an idea of what `optimizer.step()` does. No GPU, no network.
#
# - *Previous:* none, this is the first.
# - *Next:* [01 · Why orthogonalize a gradient?](01_why_orthogonalize.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 00` makes. It has
#   nothing to install.
#
# Muon is an optimizer for weight matrices: SGD with momentum, and one operation more. That operation needs a
# whole matrix. What if no process has the whole matrix?
#
# Run the cells from top to bottom. Where a cell holds `...`, it waits for your answer. You can also go on
# without. The cell that begins with `dp` is yours to change: try 3 there, and run all cells again.

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
tp: int = 2
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import os
import torch
from muon_tutorial import Muon, build_mesh, launch
from muon_tutorial.learn import first_look as lesson
from muon_tutorial.learn.inputs import measure

# %% [markdown]
# ## Who holds the weight?
#
# A **process** is a running program with its own memory. No other process can look into it. Big models are
# trained by many processes at once, as a rule one for each GPU. Here all share your processor. Each has a
# number, its **rank**.
#
# The ranks stand in a grid with two axes. Along **tp** (tensor parallel) a matrix is *cut*: each rank has
# some of the columns. Along **dp** (data parallel) it is *copied*: each rank sees other data, but has the
# same numbers.
#
# Here is one weight matrix, of size 48 × 64, coloured by who holds it. Each colour is one rank. In the
# picture, tp runs from left to right, and dp from top to bottom.

# %%
plan = lesson.plan_of(dp, tp)
guess, quiz = lesson.guess_holders(plan), lesson.quiz(plan)
lesson.picture_before(plan)

# %% [markdown]
# ## Start real processes
#
# You write a function; its first argument is the rank. `launch` starts the processes, runs your function in
# each of them, and returns a list: what rank 0 returned, what rank 1 returned, and so on. (`backend` names
# the library that carries messages between them.)
#
# The numbers below are process numbers of your computer. They all differ, and none is that of this
# notebook.

# %% tags=["volatile"]
def greet(rank):
    return f"rank {rank} is process {os.getpid()}"

greetings, first_start = measure.timed(lambda: launch(greet, dp * tp, backend=backend))
print(f"this notebook is process {os.getpid()}", *greetings, sep="\n")

# %% [markdown]
# ## Predict
#
# Muon remembers past gradients in a second matrix, the **momentum**, as large as the weight. To copy that,
# too, would waste memory. With **ZeRO** (zero redundancy) nobody keeps a copy: what tp has cut, dp cuts once
# more, from top to bottom.
#
# Look at the number in the last row and the last column.
# Which ranks hold it in the weight? Which hold it in the momentum?
#
# *Easy · 1 minute · required*

# %% tags=["stub"]
weight_holders = ...  # a list of ranks, such as [0, 1]
momentum_holders = ...

# %%
guess.check(weight_holders, momentum_holders)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The last column belongs to the last place along tp, and dp copies it. The last row of the momentum belongs
# to the last place along dp, and nobody copies it.
#
# ```python
# weight_holders = [rank for rank in range(dp * tp) if rank % tp == tp - 1]
# momentum_holders = [dp * tp - 1]
# ```
#
# </details>

# %% [markdown]
# ## Run one step
#
# This is the whole program of a rank. It takes its columns of the weight and of its own gradient, and calls
# `step()`. All ranks **must call** it: inside, they send parts to each other and wait for each other.
#
# What is new in the line of `Muon(…)`: `zero1` is the ZeRO from above, the mesh is the grid of ranks, and
# `tp_dim=1` says that tp cuts columns. Weight and gradients are random numbers here.

# %%
def one_step(rank):
    parameter = torch.nn.Parameter(lesson.my_columns(lesson.weight(seed), rank, tp))
    muon = Muon([parameter], lr=0.1, strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}), tp_dim=1)
    before = parameter.detach().clone()
    parameter.grad = lesson.my_columns(lesson.local_gradient(seed, rank // tp), rank, tp)
    muon.step()
    return lesson.WeightReport(before, muon.state[parameter]["momentum_buffer"], parameter.detach())

# %%
reports = launch(one_step, dp * tp, backend=backend)
print(lesson.say_report(reports))

# %% [markdown]
# ## The picture of your run
#
# Each letter stands for the bytes that a rank sent back. The same letter means the same bytes, down to the
# last bit. Compare along dp: the weights are copies, before and after. The momentum is not: every rank has
# a letter of its own.

# %%
lesson.picture_of_run(plan, reports)

# %% [markdown]
# ## Is it the same answer?
#
# Now one process alone, with PyTorch's own `torch.optim.Muon`, the whole matrix and the mean of all
# gradients, as if it had seen all data. Beside it, the columns that the ranks sent back, put together.

# %%
alone = torch.nn.Parameter(lesson.weight(seed))
alone.grad = lesson.mean_gradient(seed, dp)
torch.optim.Muon([alone], lr=0.1).step()
together = lesson.join_columns([report.after for report in reports[:tp]])
print("the same bits:", torch.equal(together, alone.detach()))

# %% [markdown]
# No rank kept the whole momentum, and yet no bit is different. The reason is moment 4 in the next picture:
# the ranks put the matrix together, because **orthogonalizing**, Muon's special step, needs all of it. Then
# each keeps its part again. Move the slider through the step, and choose a rank.

# %%
lesson.explore(plan, live=widgets)

# %% [markdown]
# ## What it cost on your machine
#
# Starting processes, their memory, and one step. Compare the last two lines: for so small a matrix, do many
# processes help? Later lessons measure when they do.

# %% tags=["volatile"]
_, next_start = measure.timed(lambda: launch(greet, dp * tp, backend=backend))
costs = launch(lesson.cost_of_steps, dp * tp, args=(dp, tp, seed, steps), backend=backend)
[alone_seconds] = launch(lesson.cost_alone, 1, args=(seed, steps))
print(lesson.say_cost(costs, alone_seconds, first_start, next_start))

# %% [markdown]
# ## Recap
#
# - tp *cuts* a matrix, dp *copies* it. ZeRO makes dp cut the momentum as well.
# - No rank keeps all, and together they take the step that one process would take, to the bit.
# - In the middle of the step the whole matrix exists for a moment, on the ranks that orthogonalize it.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above.
#
# 1. `copies`: how many ranks hold the first column of the weight?
# 2. `kept`: how many numbers of the momentum does rank 0 keep?
# 3. `difference`: what is the largest difference between `together` and `alone`?

# %% tags=["stub"]
answers = {"copies": ..., "kept": ..., "difference": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# kept = reports[0].momentum.numel()
# answers = {"copies": dp, "kept": kept, "difference": (together - alone.detach()).abs().max().item()}
# ```
#
# </details>
