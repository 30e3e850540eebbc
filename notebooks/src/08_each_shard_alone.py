# %% [markdown]
# # 08 · What happens if each shard is orthogonalized alone?
#
# **Twenty minutes.** At the end you can say what goes wrong if every rank orthogonalizes only what it holds,
# why no learning rate mends it, and why a test with random matrices does not notice. And you have written
# the gather that mends it, and run it on real processes.
#
# *You need* lesson 01: singular values, and UVᵀ, the orthogonalized matrix. Lesson 06: the grid of ranks, and
# how tp cuts a matrix.
#
# - *Previous:* [06 · The 2-D grid, and what TP cuts](06_the_grid.ipynb)
# - *Next:* [09 · The mirror: how does every matrix find its way back?](09_the_mirror.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 08` makes. It has
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
tp: int = 4
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.learn import shards_alone as lesson
from muon_tutorial.learn.inputs import recordings

# %% [markdown]
# ## A matrix that nobody holds
#
# Here is a matrix of a small GPT, cut by tp. Cut by columns, or by rows: a model has both kinds. Each colour
# is one place along tp; ranks along dp hold copies. (In this lesson `tp` is 2 or 4. Buttons below try 8, too.)

# %%
gradient = lesson.gradient()
guess, gathering, quiz = lesson.predict(tp), lesson.check_gather(dp, tp, backend), lesson.quiz(tp)
print(recordings.real_gradient("down"))
lesson.picture_of_cuts(tp)

# %% [markdown]
# Muon wants the gradient's UVᵀ. No rank has the whole gradient. One idea costs no message at all: each rank
# orthogonalizes its own piece, its **shard**, and keeps the result. It is what you get by just calling Muon on
# every rank. No error, and the loss goes down.
#
# ## Predict
#
# Cut by columns. Each rank's result has singular values of 1, all of them. Now put the results side by side
# again, as one matrix. What is its largest singular value? And is it the UVᵀ of the whole gradient?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
largest = ...  # a number
is_uvt = ...  # True or False

# %%
guess.check(largest, is_uvt)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A row of the whole consists of one row from each rank. Squares of lengths add, so the square of each
# singular value becomes tp (as no piece is narrower than it is tall).
#
# ```python
# largest = torch.linalg.svdvals(lesson.pieces_alone(gradient, 1, tp))[0].item()
# is_uvt = False
# ```
#
# </details>

# %% [markdown]
# ## Run it
#
# On real ranks. `my_piece` cuts out what one place along tp holds. `orthogonal` is the exact UVᵀ, so that
# nothing here comes from Newton–Schulz. `pieces` are those of one line along tp.

# %%
def each_alone(rank):
    mine = lesson.my_piece(gradient, 1, rank % tp, tp)
    return lesson.orthogonal(mine)

# %%
pieces = launch(each_alone, dp * tp, backend=backend)[:tp]
update = torch.cat(pieces, dim=1)
alone = lesson.compare(update, gradient)
print(alone)

# %% [markdown]
# **Cosine** says whether two matrices point the same way: 1 is the same way, 0 is at right angles. **Distance**
# is the size of the difference, divided by the size of UVᵀ. In brackets stands what is left of it with the
# factor that brings the update nearest: the best that a learning rate could do.
#
# The singular values are all equal. To somebody who looks at the spectrum only, this update is perfect, up to
# a factor. But the cosine says that it points elsewhere. A factor does not change the cosine: no learning rate
# mends this.
#
# ## Why so flat?
#
# Call the pieces' results P₁, P₂ and so on. The whole update S, times its transpose, is P₁P₁ᵀ + P₂P₂ᵀ + …, and
# each of these products is the identity (as no piece is narrower than it is tall). So the sum is tp times the
# identity, *whatever the gradient was*. Random numbers in, flat spectrum out. A flat spectrum is no proof.

# %%
identity = torch.eye(len(update), dtype=update.dtype)
print("tp times the identity:", torch.allclose(update @ update.T, tp * identity))

# %% [markdown]
# ## Both cuts, more and more pieces
#
# The same gradient. Panel 1: the whole, before and after. Panel 2: in pieces. Panels 3 and 4: how wrong, by
# the number of pieces. In panel 4 a distance of 1 is as far off as no update at all. (Much of the columns'
# distance is their factor, which the cosine leaves out.)

# %%
lesson.picture_of_panels(gradient, tp)

# %% [markdown]
# Cut by rows, the spectrum is not even flat. Rows of different pieces share directions: many rows of a
# gradient say nearly the same. Each rank makes that shared direction loud by itself, and together they make
# it too loud. Other directions come out far too quiet.
#
# ## Shard or not?
#
# Press the buttons. Beside the real gradient stand two made-up matrices of the same shape. *Gaussian*: all
# numbers are independent. *Power law*: few loud directions, many quiet ones, as gradients have them. Find the
# case that is nearly right.

# %%
lesson.explore(tp, live=widgets)

# %% [markdown]
# It is the Gaussian one, cut by rows. Its rows share hardly any direction, so to orthogonalize them apart or
# together is nearly the same. A test that uses `torch.randn` meets just this case, and passes. Test with a
# power law, or with a real gradient.
#
# (There are optimizers that work on pieces on purpose, and on the whole from time to time. They are other
# optimizers, with learning rates of their own. This course wants the step that one process would take.)
#
# ## Mend it: gather first
#
# Write a function that puts the pieces of one tp line together. It gets this rank's piece, the dimension
# that was cut (1: columns, 0: rows), and the group: the ranks that call together, here one line along tp.
# `dist.all_gather(list, tensor, group=group)` sends the tensor to all, and fills the list with everybody's.
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def gather_whole(piece, dim, group):
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    return ...  # gather before this line; then return the whole matrix

# %% [markdown]
# It runs on real ranks, with a matrix in which every number says where it belongs. The colour is the place
# along tp from which a number came. A red cross is the first number in a wrong place.

# %% tags=["ranks"]
gathered = lesson.run_gather(gather_whole, dp, tp, backend)
lesson.picture_of_gathered(gathered)

# %%
gathering.check(gather_whole)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def gather_whole(piece, dim, group):
#     pieces = [torch.empty_like(piece) for _ in range(group.size())]
#     dist.all_gather(pieces, piece, group=group)
#     return torch.cat(pieces, dim=dim)
# ```
#
# </details>

# %% [markdown]
# ## The same update again
#
# Now each rank gathers, orthogonalizes the whole, and keeps its own columns of the result. The function is
# yours, if it has passed.

# %%
gather = gathering.accepted_or(lesson.gather_whole)
def all_together(rank):
    piece = lesson.my_piece(gradient, 1, rank % tp, tp)
    whole = gather(piece, 1, lesson.tp_group(dp, tp))
    return lesson.my_piece(lesson.orthogonal(whole), 1, rank % tp, tp)

# %%
mended = launch(all_together, dp * tp, backend=backend)[:tp]
print(lesson.compare(torch.cat(mended, dim=1), gradient))

# %% [markdown]
# Every singular value is 1 and the distance is nothing, for any gradient and any cut.
#
# ## What it costs
#
# Messages, and work that every rank of the line now does over again. This is the price that the rest of the
# course works on: who should orthogonalize what, so that it is done once, and little travels?

# %% tags=["volatile"]
costs = launch(lesson.cost_of_both, dp * tp, args=(gather, dp, tp, steps), backend=backend)
print(lesson.say_cost(costs, tp))

# %% [markdown]
# ## Recap
#
# - To orthogonalize pieces is not to orthogonalize the whole.
# - Cut by columns, a wide matrix comes out flat, at the square root of tp, and pointing elsewhere: a flat
# spectrum can be the wrong update.
# - Cut by rows, it is nearly harmless for independent numbers, and wrong for real gradients. Test with
# those.
# - The remedy is to gather before Newton–Schulz, and to keep your piece after it.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above.
#
# 1. `largest`: the largest singular value of the pieces' update, cut by columns over tp?
# 2. `cosine`: its cosine to UVᵀ?
# 3. `received`: how many numbers does a rank receive in the gather?

# %% tags=["stub"]
answers = {"largest": ..., "cosine": ..., "received": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# received = (tp - 1) * pieces[0].numel()
# answers = {"largest": alone.values[0], "cosine": alone.cosine, "received": received}
# ```
#
# </details>
