# %% [markdown]
# # 08 · What happens if each shard is orthogonalized alone?
#
# Each rank calls Muon on its piece of the gradient: no message, no error. What is wrong with the update, and which
# test would notice?

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
from muon_tutorial.learn import shards_alone as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Fifty minutes.** The optional exercises take fifteen more. At the end you can say what goes wrong if every
# rank orthogonalizes only what it holds, why no learning rate repairs it, and why a test with random matrices does
# not notice. You will have written the gather that repairs it, and run it on real processes.
#
# *You need* lesson 01: singular values, and UVᵀ, the orthogonalized matrix. Lesson 07: the grid of ranks, and how tp
# cuts a matrix.
#
# - *Previous:* [07 · What do tp and dp cut?](07_what_tp_and_dp_cut.ipynb)
# - *Next:* [09 · The mirror: how does every matrix find its way back?](09_the_mirror.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 08` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* tp can be 2 or 4, dp anything. *Find the harmless one* tries 8 shards, too.
#
# *The heat maps:* each square stands for 4 × 4 entries. A darker square means larger entries, on a square-root
# scale, so that you also see what is faint.
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
guess, near, where, ratio, gathering, surviving, quiz = lesson.all_exercises(dp, tp, backend)
_ = my_muon.so_far("08")

# %% [markdown]
# ## The picture you have just seen
#
# A gradient G = U S Vᵀ pairs each input direction (a column of V) with an output direction (a column of U). `Uᵀ ·
# update · V` says, in row i and column j, how strongly input direction j moves output direction i. For the right
# update, UVᵀ, it has ones on the diagonal and zeros elsewhere (`lesson.orthogonal` computes UVᵀ exactly):

# %%
gradient = lesson.gradient()
U, S, Vt = torch.linalg.svd(gradient, full_matrices=True)
turned = U.T @ lesson.orthogonal(gradient) @ Vt.T
print(recordings.real_gradient("down"), turned[:3, :5].abs().round(decimals=3), sep="\n")

# %% [markdown]
# In the heat maps at the top, grey off the diagonal means that an input moves an output other than its partner. The
# left part is a square. The columns to its right are inputs that the gradient ignores: G times them is zero.
#
# A rank's piece of `G[I, J_tp]`, or of `G[I_tp, J]`, is its **shard**:

# %%
lesson.picture_of_cuts(tp)

# %% [markdown]
# ## Predict
#
# Each shard, orthogonalized alone, has only singular values of 1. If tp cuts columns, what is the largest singular
# value of all shards side by side? And would shards of pure noise give the same singular values? (Our gradient is 64
# × 256.)
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
# A row of the whole consists of one row from each shard. In a shard, rows have length 1 and stand at right angles.
# Joined side by side, the rows still stand at right angles, but the square of a row's length is now tp, and so the
# square of each singular value is tp, too. Nothing in this depends on the gradient, so noise does the same.
#
# ```python
# largest = round(tp**0.5, 2)
# noise_too = True
# ```
#
# </details>

# %% [markdown]
# On real ranks:

# %% tags=["ranks"]
def each_alone(rank):
    shard = lesson.my_piece(gradient, 1, rank % tp, tp)
    return lesson.orthogonal(shard)

shards = launch(each_alone, dp * tp, backend=backend)[:tp]
update = torch.cat(shards, dim=1)

# %% tags=["answer"]
compare({"largest": largest, "noise_too": noise_too}, lesson.outcomes(tp))

# %% [markdown]
# All singular values are equal, *whatever the gradient was*, because `update @ update.T` is tp times the identity. So a
# flat spectrum proves nothing. Compare the update with UVᵀ itself, by two numbers: the **cosine** is 1 if two
# matrices point the same way, and 0 at right angles. The **distance** is the Frobenius norm (lesson 02) of their
# difference, divided by that of UVᵀ.
#
# <details><summary>Why tp times the identity?</summary>
#
# Call the shards' results P₁, P₂, … Then `update @ update.T` is P₁P₁ᵀ + P₂P₂ᵀ + …, with one summand for each shard,
# and each is the identity, as long as no shard is taller than wide.
#
# </details>
#
# <details><summary>Hint</summary>
#
# Multiply the two matrices entry by entry and add up: that is the product of their Frobenius norms, times the cosine.
#
# </details>
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def nearness(update, right):
    return ..., ...  # cosine, distance

# %%
near.check(nearness)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The cosine ignores size: twice the right update still has a cosine of 1. The distance notices that, and so you need
# both.
#
# ```python
# def nearness(update, right):
#     cosine = (update * right).sum() / (update.norm() * right.norm())
#     distance = (update - right).norm() / right.norm()
#     return cosine.item(), distance.item()
# ```
#
# </details>

# %% [markdown]
# And where does the update act? Energy is again a value squared (lesson 01), here each entry of `Uᵀ · update · V`.
# What shares of all energy are on the diagonal, elsewhere in the 64 × 64 square, and to the right of it, on ignored
# inputs?
#
# <details><summary>Hint</summary>
#
# The first columns, as many as `turned` has rows, are the square. With `squares = turned**2`, `squares.diagonal()` are
# the entries on its diagonal.
#
# </details>
#
# *Medium · 4 minutes · required*

# %% tags=["stub"]
def shares(turned):
    # turned: Uᵀ · update · V, wider than tall
    return ...  # three shares, which add up to 1

# %%
where.check(shares)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def shares(turned):
#     squares = turned**2
#     on, inside = squares.diagonal().sum(), squares[:, : len(turned)].sum()
#     parts = [on, inside - on, squares.sum() - inside]
#     return [(part / squares.sum()).item() for part in parts]
# ```
#
# </details>

# %% tags=["answer"]
cosine, distance = near.accepted_or(lesson.nearness)(update, lesson.orthogonal(gradient))
print(f"cosine {cosine:.3f}, distance {distance:.3f}")
parts = where.accepted_or(lesson.energy_shares)(lesson.in_directions(update, gradient))
print("on the diagonal {:.0%}, elsewhere in the square {:.0%}, on ignored inputs {:.0%}".format(*parts))

# %% [markdown]
# ## Find the harmless one
#
# Cut three matrices both ways: the *real* gradient, a *Gaussian* one (independent entries), and a *power law* (a few
# loud directions, many quiet ones). In which case is the shards' update nearly right?
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
# The rows of a Gaussian matrix share hardly any direction, so it makes little difference whether they are
# orthogonalized together. The rows of a real gradient share its loud directions. Every shard by itself makes these
# loud, so in the joined update they are too loud, and the quiet directions nearly die.
#
# ```python
# harmless = ("Gaussian", "rows")
# ```
#
# </details>

# %% [markdown]
# A real gradient's loud directions are in every shard, and each shard makes them loud. Noise has none, so if tp cuts
# rows, a test with `torch.randn` may pass.
#
# ## Two matrices as one
#
# The opposite mistake: many MLPs have a third matrix, gate, beside up. Often they are stacked, gate above up, and
# orthogonalized as `one` matrix, instead of each by itself (`apart`). With Gaussian gradients, 688 × 256 each, how
# many times as large is the norm of `apart` as that of `one`? And if gate's gradient is five times larger, how many
# times too small is up's update in `one`?
#
# <details><summary>Hint</summary>
#
# The square of a matrix's size is the sum of its squared singular values.
#
# </details>
#
# *Easy · 3 minutes · optional*

# %% tags=["stub", "predict"]
larger = ...  # to two decimals
smaller = ...  # 1.4, 4 or 25

# %% tags=["answer"]
def as_one_and_apart(times):
    gate, up = times * torch.randn(688, 256), torch.randn(688, 256)
    apart = [zeropower_via_newtonschulz(gate), zeropower_via_newtonschulz(up)]
    return zeropower_via_newtonschulz(torch.cat([gate, up])).float(), torch.cat(apart).float()

torch.manual_seed(seed)
one, apart = as_one_and_apart(times=1)
louder, due = as_one_and_apart(times=5)
print(f"distance between `one` and `apart`, divided by the size of `one`: {(one - apart).norm() / one.norm():.2f}")
size, times = apart.norm() / one.norm(), due[688:].norm() / louder[688:].norm()
compare({"larger": larger, "smaller": smaller}, {"larger": round(size.item(), 2), "smaller": round(times.item())})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Gate and up should have 256 singular values of 1 each. The stack has only 256 for both, so its size is √2 times too
# small. In a direction that both use alike, gate's part is five times as long as up's, and together they have length
# 1. So up gets 1 / √(5² + 1), about a fifth. Where gate is quiet, up keeps more, so on the whole it keeps a quarter.
#
# ```python
# larger = 1.41
# smaller = 4
# ```
#
# </details>

# %% [markdown]
# <details><summary>This has happened, and how the package finds such weights</summary>
#
# Issues of pytorch/torchtitan (4532), NVIDIA/Megatron-LM (7077) and others report fused weights that Muon took as one
# matrix. `split_parameters` reads from the model how a weight is fused, and says so where it cannot. And DeepSpeed's
# issue 8437 is about shards: halves of 256 × 256 matrices were orthogonalized alone, and their updates were 52.5 to
# 52.8 percent off.
#
# </details>
#
# ## A shard gets the size wrong, too
#
# Muon's size factor depends on the shape m × n of the *whole* matrix. So code that takes it from `shard.shape` may be
# wrong, even after a gather. Two formulas are in use:
#
# ```text
# Keller Jordan                     sqrt(max(1, m/n))
# Moonshot AI (Liu et al., 2025)    0.2·sqrt(max(m, n))
# ```

# %%
print(lesson.say_factors((256, 64), dim=0, tp=2))

# %% [markdown]
# Write a function that divides the whole matrix's factor by the shard's, for both formulas, any shape and either cut.
#
# <details><summary>Hint</summary>
#
# Write one small function that returns both factors for a shape. Call it with the whole shape, and with the shape in
# which `dim` is tp times shorter.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def too_small(shape, dim, tp):
    # the whole matrix's factor, divided by the shard's: first Keller Jordan's, then Moonshot's
    m, n = shape
    return ...  # two ratios

# %%
ratio.check(too_small)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The ratio is not always √tp. A cut makes one side shorter, and then `max` may choose another side for the shard than
# for the whole.
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
# Each ratio says how many times too small a shard's factor is. A ratio below 1 means that the factor is too *large*.
# In the table's first line (our matrix, cut by columns) two errors meet. Orthogonalizing each shard alone made all
# singular values √tp times too large, and Moonshot's factor of a shard is √tp times too small. They cancel, so the
# wrong update has the right size!
#
# ## Repair it: gather first
#
# Put the shards together along `dim`, from `X[I_tp, J]` or `X[I, J_tp]` to `X[I, J]`.
#
# <details><summary>Hint</summary>
#
# The list needs a tensor of its own for each shard, so call `torch.empty_like(shard)` once for each. (In
# `[empty] * n` all entries are the same tensor.) The shards arrive in the group's order, and `torch.cat` joins them.
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def gather_whole(shard, dim, group):
    # dist.all_gather(list, tensor, group=group) fills a list of group.size() empty tensors
    # all shards have the same shape (an uneven cut would need padding)
    return ...  # the whole matrix

# %% [markdown]
# Colours show which rank an entry came from, and a red cross marks the first misplaced entry:

# %% tags=["ranks"]
gathered = lesson.run_gather(gather_whole, dp, tp, backend)
lesson.picture_of_gathered(gathered)

# %%
gathering.check(gather_whole)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Without `dim`, `torch.cat` puts the shards above each other, which is right only if tp has cut rows.
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
# Gathering costs messages, and every tp rank repeats the same work:

# %% tags=["volatile"]
gather = gathering.accepted_or(lesson.gather_whole)
costs = launch(lesson.cost_of_both, dp * tp, args=(gather, dp, tp, steps), backend=backend)
print(lesson.say_cost(costs, tp))

# %% [markdown]
# ## An update that survives its shards
#
# If a matrix is cut by columns, ranks can find the exact update without gathering it. Your budget, on a ring:

# %%
print(lesson.say_budget(tp))

# %% [markdown]
# Find this update, in float32.
#
# <details><summary>Hint</summary>
#
# UVᵀ is (GGᵀ)^(-1/2) G. Your rank has its columns of the right-hand G. How large is GGᵀ, and how does it follow from
# the shards? (`torch.linalg.eigh` takes a symmetric matrix apart into eigenvalues and directions.)
#
# </details>
#
# *Hard · 12 minutes · optional · par 24576 bytes*

# %% tags=["stub"]
def surviving_update(shard, group):
    # shard: this rank's columns of G; only dist.all_gather and dist.all_reduce may send
    return ...  # this rank's columns of the whole UVᵀ

# %%
surviving.check(surviving_update)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With G = U S Vᵀ, GGᵀ = U S² Uᵀ, and (GGᵀ)^(-1/2) G = U Vᵀ. A rank has its columns of G. All that it lacks is GGᵀ.
# This matrix is small, and it is a sum over ranks. (It is symmetric, so if you send only one triangle, you are below
# par.)
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
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Orthogonalizing the shards does not orthogonalize the matrix.
# - If you cut the long side (a wide matrix by columns, a tall one by rows), the spectrum stays flat until
#   that side becomes a shard's shorter one. In our case part of the update acts on inputs that the gradient ignores.
# - If you cut the short side, random entries hide the mistake. Test with real gradients.
# - Gather before Newton–Schulz, keep your shard after it, and take the factor from the whole matrix's shape.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {
    "cosine": ...,  # if tp cuts by columns, what is the cosine between the shards' update and UVᵀ?
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
# answers = {"cosine": cosine, "factor": ratios((64, 256), 1, tp)[1], "sent": sent}
# ```
#
# </details>

# %% [markdown]
# ## Gathered first

# %%
def all_together(rank):
    shard = lesson.my_piece(gradient, 1, rank % tp, tp)
    whole = gather(shard, 1, lesson.tp_group(dp, tp))
    return lesson.my_piece(zeropower_via_newtonschulz(whole), 1, rank % tp, tp)

# %% tags=["ranks"]
repaired = torch.cat(launch(all_together, dp * tp, backend=backend)[:tp], dim=1)
print("the same bits as in one process:", torch.equal(repaired, zeropower_via_newtonschulz(gradient)))

# %% [markdown]
# At what distance from UVᵀ is this update?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
left = ...  # to one decimal, such as 0.5

# %% tags=["answer", "volatile"]
repaired = repaired.double()
result, turned = lesson.compare(repaired, gradient), lesson.in_directions(repaired, gradient)
picture = lesson.draw_update("real matrix, gathered first", result, turned, "shards_alone-repaired")
compare({"left": left}, {"left": round(result.distance, 1)}, picture)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Newton–Schulz saw the whole matrix and moved no directions, but its singular values never settle at 1 (lesson 02).
#
# ```python
# left = 0.2
# ```
#
# </details>

# %% [markdown]
# The next lesson asks how every matrix finds its way back to its ranks.
#
# *Read on:* [DeepSpeed's issue 8437](https://github.com/deepspeedai/DeepSpeed/issues/8437)
