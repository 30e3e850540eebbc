# %% [markdown]
# # 01 · Why orthogonalize a gradient?
#
# A gradient shouts in a few directions and whispers in the others, and Muon makes all equally loud. Why does that
# help a model learn?

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
from muon_tutorial.learn import why_muon as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Fifty-five minutes.** At the end you can write Muon's whole update, to the same bits as PyTorch's, and say what
# each line does and which matrices it is for.
#
# *You need* to know what a gradient is, and a matrix product. Everything runs in one process. No GPU, no
# network.
#
# - *Previous:* [00 · What does a distributed Muon step look like?](00_a_distributed_muon_step.ipynb)
# - *Next:* [02 · How do a few matrix products do it?](02_five_matrix_products.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 01` makes.
#
# Of the parameters below, this lesson uses `steps` (of training, before we look), `seed` and `widgets`.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 40
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
from muon_tutorial import split_parameters, zeropower_via_newtonschulz
from muon_tutorial.learn import why_muon as lesson
from muon_tutorial.learn.inputs import measure, small_gpt
from muon_tutorial.learn.widgets.reveal import compare
race = lesson.recorded_race()

# %% [markdown]
# ## Place your bet
#
# Three optimizers have trained the same small GPT on the bytes of real text. **SGD** follows the gradient, **Adam**
# (here AdamW) divides each entry by its usual size, and **Muon** makes all directions equally loud.

# %%
print(race)
for who in lesson.RACERS:
    print(f"{who}: learning rate {race.best(who).rate:g}, the best of {len(race.tried(who))} tried")

# %% [markdown]
# Which wins, and at which step does the winner reach the runner-up's last loss?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
winner = ...  # "SGD", "AdamW" or "Muon"
caught = ...  # a step, to the nearest ten, such as 150

# %% tags=["answer"]
compare({"winner": winner, "caught": caught}, lesson.outcome(race))

# %% tags=["answer"]
lesson.explore_race(race, live=widgets)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Nothing that you have read so far could tell you: only a run shows it. AdamW comes second, and Muon is where AdamW
# ends after about half as many steps. This lesson looks for the reason, in directions of the gradient that hardly move
# with SGD.
#
# ```python
# winner = "Muon"
# caught = 100  # of 200
# ```
#
# </details>

# %% [markdown]
# <details><summary>Was it fair?</summary>
#
# AdamW is Adam, and shrinks the weights as well. The three runs differ in one thing: which optimizer steps the
# *hidden* matrices, those of attention and MLP. In all three, AdamW steps the rest (the embedding at the beginning,
# the head at the end, and the small vectors of the norms), at the rate that was best for AdamW alone. For the hidden
# matrices we tried rates a factor of two apart, and the best was never at either end. SGD has the same momentum as
# Muon (0.95), and all rates fall in a straight line to zero. The thin lines are other seeds. Still, one
# small model proves little. [Keller Jordan's post](https://kellerjordan.github.io/posts/muon/) reports long runs, and
# `python -m muon_tutorial.learn.why_muon.race` records this race again.
#
# </details>

# %% [markdown]
# ## Loud and quiet directions
#
# A step moves a layer's output by `lr * update @ x`. In the top picture, the circle is all inputs x of length 1, and
# an update turns it into an ellipse. The arrows are the ellipse's axes, as long as the update's **singular values**.
# Here is a real layer's gradient:

# %% tags=["volatile"]
run, seconds = measure.timed(lambda: small_gpt.train(steps, seed))
G = run.gradients[lesson.EXAMPLE]
energy, svd, promised, whole, sorting, quiz = lesson.all_exercises(run, G)
print(lesson.say_run(run, steps, seconds))

# %% [markdown]
# The **SVD** (singular value decomposition) takes a matrix apart into directions. Each reads the input along a row of
# `Vt`, scales what it reads by its singular value, and writes the result along a column of `U`:

# %%
U, S, Vt = torch.linalg.svd(G, full_matrices=False)
print("directions:", len(S))
direction = torch.outer(U[:, 0], Vt[0])  # the loudest: it maps Vt[0] to U[:, 0]
print("it maps Vt[0] to U[:, 0]:", torch.allclose(direction @ Vt[0], U[:, 0], atol=1e-5))
print("all together are G:", torch.allclose(U @ torch.diag(S) @ Vt, G, atol=1e-5 * S[0].item()))

# %% [markdown]
# A direction's **energy** is its singular value squared. How many of the loudest directions carry a given share of
# all energy?
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def loudest(S, share):
    # S: singular values, the loudest first; share: for example 0.5
    return ...  # a whole number

# %%
energy.check(loudest)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def loudest(S, share):
#     energy = (S**2).cumsum(0) / (S**2).sum()
#     return int((energy < share).sum()) + 1
# ```
#
# </details>

# %% tags=["volatile"]
loudest = energy.accepted_or(lesson.loudest)
print("half of all energy:", loudest(S, 0.5), "of", len(S), "directions; nine tenths:", loudest(S, 0.9))
lesson.picture_of_gradient(G)

# %% [markdown]
# SGD follows the gradient, so it hardly learns at the quiet end of this **spectrum**, the curve of singular values.
# But directions that only rare text needs are quiet, too.
#
# ## Make them equally loud
#
# Orthogonalizing a matrix keeps its directions and sets every singular value to 1. Write such an update, from `G` and
# its momentum `buffer`.
#
# <details><summary>Hint</summary>
#
# `a.lerp(b, w)` is `a + w * (b - a)`, and `lerp_` does the same in place. In an SVD the singular values stand in the
# middle, as `U S Vᵀ`. If they are all 1, what is left to multiply?
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def svd_update(G, buffer, momentum=0.95):
    # momentum: buffer becomes 0.95 of itself plus 0.05 of G, in place
    # Nesterov: 0.05 of G plus 0.95 of the new buffer, as a new tensor
    # orthogonalize that sum with an SVD, and return it
    return ...

# %%
svd.check(svd_update)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The next step needs `buffer`, so it changes in place. `ahead` is for this step alone: `lerp_` would overwrite the
# gradient here, while `lerp` returns a new tensor.
#
# ```python
# def svd_update(G, buffer, momentum=0.95):
#     buffer.lerp_(G, 1 - momentum)
#     ahead = G.lerp(buffer, momentum)
#     U, S, Vt = torch.linalg.svd(ahead, full_matrices=False)
#     return U @ Vt
# ```
#
# </details>

# %% [markdown]
# This is what each optimizer makes of the gradient (Muon "as it runs" is lesson 02's approximation):

# %% tags=["volatile"]
orthogonalize = lesson.without_momentum(svd.accepted_or(lesson.svd_update))
lesson.explore(run, orthogonalize, live=widgets)

# %% [markdown]
# ## Why flat is good
#
# Suppose no step may move a layer's output too far, whatever the input. It moves at most by the ellipse's longest
# axis, so to make that 1, divide `update` by its largest singular value. Then compute its
# *promise*, how far the loss would fall if the gradient stayed the same: multiply the divided update by `G`, entry by
# entry, and add up the products.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def promise(G, update):
    return ...  # the promise of the divided update

# %%
promised.check(promise)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `update.norm()` would be the size of all directions together, but the limit is on the loudest alone. `svdvals`
# sorts, so the loudest comes first.
#
# ```python
# def promise(G, update):
#     limited = update / torch.linalg.svdvals(update)[0]
#     return (G * limited).sum()
# ```
#
# </details>

# %% tags=["volatile"]
promise = promised.accepted_or(lesson.promise)
for name, update in {"U @ Vt": orthogonalize(G), "G itself": G}.items():
    print(f"{name} promises {promise(G, update):.5f}; the singular values of G add up to {S.sum():.5f}")

# %% [markdown]
# No update promises more than `U @ Vt`. Each direction of `G` adds to the promise its singular value times its
# strength in the divided update. That strength is at most 1, and `U @ Vt` reaches 1 in every direction. The dark bars
# show how far the loss really fell:

# %% tags=["volatile"]
drops = lesson.loss_drops(run, orthogonalize)
lesson.picture_of_drops(drops)

# %% [markdown]
# ## The whole update, once
#
# Two things are missing. The **size factor** multiplies the update: it is the root of rows / columns of `W`, but at
# least 1. **Weight decay** shrinks `W` by the fraction `lr * weight_decay`.
#
# <details><summary>Why a size factor, and what is decoupled?</summary>
#
# Orthogonalizing forgets the gradient's length, so only learning rate and shape decide how far a weight moves. A tall
# matrix spreads a change of the same length over more outputs. The factor makes each output move as far as in a
# square matrix. Weight decay is called *decoupled* here because it never touches the gradient.
#
# </details>
#
# The table follows one gradient through all stages. (**RMS**, root mean square, is the usual size of an entry. The
# last line is what weight decay takes from `W`.)

# %% tags=["volatile"]
print(lesson.say_stages(run))

# %% [markdown]
# Write the whole update, with the same bits as `torch.optim.Muon`.
#
# <details><summary>Hint</summary>
#
# The first two lines are those of your `svd_update`, and their result goes into `zeropower_via_newtonschulz`.
# `W.add_(update, alpha=a)` adds `a * update`, so sign, learning rate and size factor go into `alpha`.
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def muon_step(W, G, buffer, lr, momentum=0.95, weight_decay=0.1):
    # 1 momentum, 2 Nesterov: as before (lerp and lerp_ round as torch does)
    # 3 orthogonalize, with zeropower_via_newtonschulz(matrix): nearly U @ Vt, see lesson 02
    # 4 size factor, from W's shape
    # 5 weight decay: W shrinks by lr * weight_decay, in place
    # 6 add the update to W, in place: W.add_(update, alpha=…)
    return ...

# %%
whole.check(muon_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The decay comes before the update is added. In the other order it would shrink the new update as well, and the bits
# would differ from torch's. (From lesson 02 on, your right answers are saved and become an
# optimizer. This one is not.)
#
# ```python
# def muon_step(W, G, buffer, lr, momentum=0.95, weight_decay=0.1):
#     buffer.lerp_(G, 1 - momentum)
#     ahead = G.lerp(buffer, momentum)
#     update = zeropower_via_newtonschulz(ahead)
#     factor = max(1, W.shape[0] / W.shape[1]) ** 0.5
#     W.mul_(1 - lr * weight_decay)
#     W.add_(update, alpha=-lr * factor)
# ```
#
# </details>

# %% [markdown]
# ## Who gets it, and who does not
#
# Muon takes the *hidden* matrices, those of attention and MLP in the blocks, and AdamW takes the rest: vectors, and
# the first and last matrix, **embedding** and **head**. Sort a model's parameters.
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def split(model):
    # model.named_parameters() gives pairs such as ("blocks.0.attention.q.weight", parameter)
    return ..., ...  # names for Muon, names for AdamW

# %%
sorting.check(split)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The number of dimensions alone does not decide: embedding and head are matrices, too. So the name has to help.
#
# ```python
# def split(model):
#     muon, adamw = [], []
#     for name, parameter in model.named_parameters():
#         is_hidden = parameter.dim() == 2 and name.startswith("blocks.")
#         (muon if is_hidden else adamw).append(name)
#     return muon, adamw
# ```
#
# </details>

# %%
hidden, rest = split_parameters(run.model)  # Muon's groups, and AdamW's pairs (name, parameter)
print("AdamW:", *sorting.accepted_or(lesson.split)(run.model)[1], sep="\n  ")

# %% [markdown]
# A vector is a single direction, so there is nothing to make equally loud. But why not embedding and head? Each byte
# of the text picks one row of the embedding, so a row's gradient comes from one byte alone. Set the gradient's row of
# the most frequent byte to zero: which other bytes' updates change?

# %% tags=["volatile"]
print(lesson.say_rows(lesson.erase_a_byte(run)))

# %% [markdown]
# With Muon, what the model learns about one byte depends on which other bytes are in the batch. So does it hurt if
# Muon steps embedding or head?

# %%
print(lesson.say_extra_lanes(race))

# %% [markdown]
# No, the loss is even lower! So "not the embedding" is only a rule of thumb.
#
# <details><summary>Why people keep to it, and was that a fair test?</summary>
#
# A table of 50,000 words is the largest, costliest matrix, and in long runs AdamW [did better on
# both](https://kellerjordan.github.io/posts/muon/#empirical-considerations), embedding and head. Our test was not
# quite fair: Muon's rate was tuned, but AdamW's, for embedding and head, was taken from the run in which AdamW steps
# everything.
#
# </details>

# %% [markdown]
# ## What it costs on your machine
#
# An SVD is a chain of many small steps, far too slow on a GPU. On a CPU it may win, because Muon multiplies in
# bfloat16 (16-bit numbers), which is slow on many CPUs:

# %% tags=["volatile"]
print(lesson.say_cost(G))

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - A gradient is loud in a few directions. Muon makes all of them equally loud.
# - Among all updates with the same largest singular value, Muon's promises the most.
# - The update is momentum, Nesterov, orthogonalize, size factor, decay, add.
# - It is for hidden matrices. AdamW has the embedding, the head and the norms.
#
# </details>
#
# **Quiz.** 1% off is near enough.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "sum": ...,  # of all singular values of orthogonalize(G)
    "times": ...,  # S[0] as a multiple of S.median(), the lower of the two middle values
    "factor": ...,  # the size factor of a weight of 400 rows and 100 columns
    "left_out": ...,  # how many entries do all of AdamW's parameters have together?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# left_out = sum(parameter.numel() for _, parameter in rest)
# times = (S[0] / S.median()).item()
# answers = {"sum": len(S), "times": times, "factor": 4**0.5, "left_out": left_out}
# ```
#
# </details>

# %% [markdown]
# ## Your function trains a model

# %% tags=["volatile"]
mine = lesson.train_with(whole.accepted_or(lesson.muon_step), steps + 1, seed)
torchs = lesson.train_with(None, steps + 1, seed)
print(f"your loss: {mine[0]:.2f} → {mine[-1]:.2f}")
print("the same as torch's, to the last bit:", mine == torchs)

# %% [markdown]
# The next lesson asks how a few matrix products find nearly this update.
#
# *Read on:* [Muon](https://kellerjordan.github.io/posts/muon/)
