# %% [markdown]
# # 08 · What happens if each shard is orthogonalized alone?
#
# Each rank calls Muon on the piece of the gradient that it holds: no message, no error. What is wrong with the update,
# and which test would have noticed?

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
from muon_tutorial.learn import shards_alone as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Thirty minutes.** At the end you can say what goes wrong if every rank orthogonalizes only what it holds, why
# no learning rate repairs it, and why a test with random matrices does not notice. You will have written the
# gather that repairs it, and run it on real processes.
#
# *You need* lesson 01: singular values, and UVᵀ, the orthogonalized matrix. Lesson 07: the grid of ranks, and
# how tp cuts a matrix.
#
# - *Previous:* [07 · What do tp and dp cut?](07_what_tp_and_dp_cut.ipynb)
# - *Next:* [09 · The mirror: how does every matrix find its way back?](09_the_mirror.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 08` makes. It has
#   nothing to install.
#
# *Other grids:* tp can be 2 or 4, dp anything. The film tries 8 shards, too.
#
# *The heat maps:* each square stands for 4 × 4 entries, the darker the larger, on a square-root scale, so that you see
# what is faint.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 4
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from muon_tutorial import launch, zeropower_via_newtonschulz
from muon_tutorial.learn import shards_alone as lesson, my_muon
from muon_tutorial.learn.inputs import recordings
from muon_tutorial.learn.widgets.reveal import compare
guess, ratio, gathering, surviving, quiz = lesson.all_exercises(dp, tp, backend)
_ = my_muon.so_far("08")

# %% [markdown]
# ## The picture you have just seen
#
# A gradient G = U S Vᵀ pairs input directions, from V, with output directions, from U. So look at any update in these
# directions: row i, column j of `Uᵀ · update · V` says how strongly it takes input j to output i. UVᵀ has ones on the
# diagonal, and nothing else. Try it:

# %%
gradient = lesson.gradient()
U, S, Vt = torch.linalg.svd(gradient, full_matrices=True)
turned = U.T @ lesson.orthogonal(gradient) @ Vt.T
print(recordings.real_gradient("down"), turned[:3, :5].abs().round(decimals=3), sep="\n")

# %% [markdown]
# Grey off the diagonal: an input moves an output which the gradient never paired with it. Right of the square: inputs
# for which the gradient is exactly zero.
#
# tp can cut the matrix in two ways. The piece that a rank holds is its **shard**:

# %%
lesson.picture_of_cuts(tp)

# %% [markdown]
# ## Predict
#
# Cut by columns. Each shard, orthogonalized alone, has only singular values of 1. Put the results side by side: what is
# the largest singular value of the whole? And would the spectrum be just as flat if the gradient were pure noise?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
largest = ...  # to two decimals
noise_too = ...  # True or False

# %%
guess.check(largest, noise_too)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A row of the whole consists of one row from each shard. Squares of lengths add, so the square of each singular
# value becomes tp. Nothing in this depends on the gradient.
#
# ```python
# largest = round(tp**0.5, 2)
# noise_too = True
# ```
#
# </details>

# %% [markdown]
# Now on real ranks. `my_piece` cuts out a rank's shard; `orthogonal` is the exact UVᵀ, so don't blame Newton–Schulz.

# %% tags=["ranks"]
def each_alone(rank):
    shard = lesson.my_piece(gradient, 1, rank % tp, tp)
    return lesson.orthogonal(shard)

shards = launch(each_alone, dp * tp, backend=backend)[:tp]
update = torch.cat(shards, dim=1)
alone = lesson.compare(update, gradient)

# %% tags=["answer"]
print(alone)
compare({"largest": largest, "noise_too": noise_too}, lesson.outcomes(tp))

# %% [markdown]
# **Cosine** is 1 where two matrices point the same way, and 0 at right angles. **Distance** is the size of the
# difference over the size of UVᵀ; in brackets, how much is left with the best learning rate. It stays large.
#
# Yet all singular values are equal, *whatever the gradient was*: `update @ update.T` is tp times the identity. A flat
# spectrum proves nothing.
#
# <details><summary>Why tp times the identity?</summary>
#
# Call the shards' results P₁, P₂, … Then `update @ update.T` is P₁P₁ᵀ + P₂P₂ᵀ + …, one summand for each shard. Every
# summand is the identity, as long as no shard is taller than wide.
#
# </details>

# %%
identity = torch.eye(len(update), dtype=update.dtype)
print("tp times the identity:", torch.allclose(update @ update.T, tp * identity))
print("energy:", lesson.shares(lesson.in_directions(update, gradient)))

# %% [markdown]
# That last share moves weights for inputs about which the gradient said nothing.
#
# ## Find the harmless one
#
# Two ways to cut, and three matrices of the same shape: the *real* gradient, a *Gaussian* one (independent entries),
# and a *power law* (few loud directions, many quiet ones). In one of the six cases, shards alone are nearly right. Bet
# first, then play.
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
harmless = ...  # such as ("real", "columns")

# %% tags=["answer"]
lesson.explore(tp, live=widgets)

# %% tags=["answer"]
compare({"harmless": harmless}, {"harmless": lesson.harmless(tp)})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Its rows share hardly any direction, so it makes little difference whether they are orthogonalized together.
# Rows of a real gradient share loud directions. Each shard makes those loud by itself, and together they make them
# too loud. The quiet ones nearly die.
#
# ```python
# harmless = ("Gaussian", "rows")
# ```
#
# </details>

# %% [markdown]
# (For a tall matrix, exchange rows and columns.) A unit test with `torch.randn` may meet the harmless case, and pass.
#
# ## A shard gets the size wrong, too
#
# Muon multiplies its update by a factor of the shape m × n: Keller Jordan's is `sqrt(max(1, m/n))`, that of Moonshot
# AI (*Muon is Scalable for LLM Training*, 2025) is `0.2·sqrt(max(m, n))`. Both mean the *whole* matrix; `shard.shape`
# gives another factor, even after a perfect gather. For example, cut by rows:

# %%
print(lesson.say_factors((256, 64), dim=0, tp=2))

# %% [markdown]
# Write that for every shape and cut: for both formulas, in this order, the whole's factor divided by the shard's.
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def too_small(shape, dim, tp):
    m, n = shape
    return ...  # two ratios

# %%
ratio.check(too_small)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def factors(m, n):
#     return max(1, m / n) ** 0.5, 0.2 * max(m, n) ** 0.5
#
# def too_small(shape, dim, tp):
#     shard = list(shape)
#     shard[dim] = shape[dim] // tp
#     whole, mine = factors(*shape), factors(*shard)
#     return [whole[0] / mine[0], whole[1] / mine[1]]
# ```
#
# </details>

# %% tags=["answer"]
ratios = ratio.accepted_or(lesson.too_small)
print(lesson.say_ratios(ratios, tp))

# %% [markdown]
# Below 1 the factor is too *large*. The first line is our matrix: the shards' update was √tp too large, and Moonshot's
# factor makes it √tp too small again. A wrong update whose entries have just the right size!
#
# ## Repair it: gather first
#
# Your function gets this rank's shard, the dimension that was cut, and the tp group. Put the group's shards together.
# `dist.all_gather(list, tensor, group=group)` fills a list of `group.size()` empty tensors with everybody's `tensor`.
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def gather_whole(shard, dim, group):
    return ...  # the whole matrix

# %% [markdown]
# Real ranks run it, on a matrix whose entries say where they belong. Colours say which rank an entry came from; a red
# cross marks the first in a wrong place.

# %% tags=["ranks"]
gathered = lesson.run_gather(gather_whole, dp, tp, backend)
lesson.picture_of_gathered(gathered)

# %%
gathering.check(gather_whole)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def gather_whole(shard, dim, group):
#     shards = [torch.empty_like(shard) for _ in range(group.size())]
#     dist.all_gather(shards, shard, group=group)
#     return torch.cat(shards, dim=dim)
# ```
#
# </details>

# %% [markdown]
# Now the whole recipe: gather, orthogonalize, keep your own columns. This time with Newton–Schulz, held against one
# process with the whole gradient.

# %%
gather = gathering.accepted_or(lesson.gather_whole)
def all_together(rank):
    shard = lesson.my_piece(gradient, 1, rank % tp, tp)
    whole = gather(shard, 1, lesson.tp_group(dp, tp))
    return lesson.my_piece(zeropower_via_newtonschulz(whole), 1, rank % tp, tp)

# %% tags=["ranks"]
repaired = torch.cat(launch(all_together, dp * tp, backend=backend)[:tp], dim=1)
print("the same bits:", torch.equal(repaired, zeropower_via_newtonschulz(gradient)))

# %% [markdown]
# The same bits, for any gradient and any cut. You pay with messages, and with work that the whole group repeats. The
# last line is a part of the one above it, measured in the same run:

# %% tags=["volatile"]
costs = launch(lesson.cost_of_both, dp * tp, args=(gather, dp, tp, steps), backend=backend)
print(lesson.say_cost(costs, tp))

# %% [markdown]
# Who should orthogonalize what, so that it is done once and little travels? That is the rest of the course.
#
# ## An update that survives its shards
#
# Cut by columns, you can have the exact update without gathering the matrix. Write a function that turns a rank's
# columns of G into its columns of the *whole* UVᵀ. The budget is counted as a ring sends (lesson 03). You may call
# `dist.all_gather` and `dist.all_reduce`; `torch.linalg.eigh` may help.

# %%
print(lesson.say_budget(tp))

# %% [markdown]
# Real ranks try it in float32, on the real gradient and the power law. Where it fails, you see *your* update's heat
# map.
#
# *Hard · 12 minutes · optional · par 24576 bytes*

# %% tags=["stub"]
def surviving_update(shard, group):
    return ...  # this rank's columns of the whole UVᵀ

# %%
surviving.check(surviving_update)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With G = U S Vᵀ, GGᵀ = U S² Uᵀ, and (GGᵀ)^(-1/2) G = U Vᵀ. A rank has its columns of G. It lacks only GGᵀ, which is a
# sum over ranks, and small. (It is symmetric, too: send one triangle of it, and you are below par.)
#
# ```python
# def surviving_update(shard, group):
#     gram = shard @ shard.T
#     dist.all_reduce(gram, group=group)
#     values, directions = torch.linalg.eigh(gram)
#     return directions @ torch.diag(values**-0.5) @ directions.T @ shard
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# - Orthogonalizing shards is not orthogonalizing the matrix.
# - Cut along the long side (a wide matrix by columns, a tall one by rows), the spectrum is flat as long as no shard is
#   longer the other way. Here the update then acts where the gradient is zero.
# - Cut along the short side, random entries hide the mistake. Test with real gradients.
# - Gather before Newton–Schulz, keep your shard after it, and take the factor from the whole's shape.
#
# **Quiz.** One line measures each.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {
    "cosine": ...,  # of the shards' update, cut by columns, to UVᵀ?
    "factor": ...,  # how many times too small is 0.2·sqrt(max(m, n)) on such a shard?
    "sent": ...,  # how many entries does a rank send in the gather, on a ring?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# sent = (tp - 1) * shards[0].numel()
# answers = {"cosine": alone.cosine, "factor": ratios((64, 256), 1, tp)[1], "sent": sent}
# ```
#
# </details>

# %% [markdown]
# So the pieces have to come together before Newton–Schulz, and to part again after it. The next lesson follows them
# there and back.
