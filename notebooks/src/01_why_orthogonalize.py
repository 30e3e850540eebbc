# %% [markdown]
# # 01 · Why orthogonalize a gradient?
#
# A gradient shouts in a few directions and whispers in all others, and Muon makes them equally loud before it
# steps. Why should that help a model to learn, and does it?

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
from muon_tutorial.learn import why_muon as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: half an hour, what you need, where to go from here</summary>
#
# **Thirty minutes.** At the end you can write Muon's whole update, to the same bits as PyTorch's, say what
# each line does, and say which matrices of a model it is for.
#
# *You need* to know what a gradient is, and a matrix product. Everything runs in one process. No GPU, no
# network.
#
# - *Previous:* [00 · What does a distributed Muon step look like?](00_a_distributed_muon_step.ipynb)
# - *Next:* [02 · How do five matrix products do it?](02_five_matrix_products.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 01` makes. It has
#   nothing to install.
#
# All lessons begin with the same parameters. This one uses `steps` (of training, before we look), `seed` and
# `widgets`.
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
# Three optimizers have trained the same small GPT on real text. **SGD** follows the gradient. **Adam**
# divides each entry by its usual size (AdamW shrinks weights, too). **Muon** makes all directions equally
# loud.

# %%
print(race)
for who in lesson.RACERS:
    print(f"{who}: learning rate {race.best(who).rate:g}, the best of {len(race.tried(who))}")

# %% [markdown]
# Who wins? And at which step does the winner reach the loss that the *second* will end with?
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
# ```python
# winner, caught = lesson.outcome(race).values()
# ```
#
# </details>

# %% [markdown]
# <details><summary>Was it fair?</summary>
#
# The lanes differ in who steps the *hidden* matrices, those of attention and MLP. Its first and last matrix
# (embedding and head) and the small vectors between layers (norms) go to AdamW in all of them, at the rate that was
# best for AdamW alone. Hidden rates were tried a factor of two apart, and the best was never the smallest or the
# largest tried. SGD has the same momentum as Muon (0.95, Nesterov). All rates fall in a line to zero. Thin lines are
# other seeds. One small model proves little; [Keller Jordan's post](https://kellerjordan.github.io/posts/muon/)
# reports long runs. `python -m muon_tutorial.learn.why_muon.race` records the race anew.
#
# </details>

# %% tags=["answer"]
lesson.picture_of_tuning(race)

# %% [markdown]
# ## Loud and quiet directions
#
# A step moves a layer's output by `lr * update @ x`: far for some inputs, hardly for others. In the first
# picture, the lengths of the ellipse's arrows are the **singular values** of the update.
#
# A real layer has as many directions as its shorter side. Train a GPT for a moment, and take a gradient:

# %% tags=["volatile"]
run, seconds = measure.timed(lambda: small_gpt.train(steps, seed))
G = run.gradients[lesson.EXAMPLE]
svd, whole, table, quiz = lesson.all_exercises(run, G)
print(lesson.say_run(run, steps, seconds))

# %% [markdown]
# The **SVD** (singular value decomposition) finds the directions. Each reads the input along a row of `Vt`,
# scales it, and writes it along a column of `U`.

# %%
U, S, Vt = torch.linalg.svd(G, full_matrices=False)
print("directions:", len(S))
direction = torch.outer(U[:, 0], Vt[0])  # the loudest: it maps Vt[0] to U[:, 0]
print("it maps Vt[0] to U[:, 0]:", torch.allclose(direction @ Vt[0], U[:, 0], atol=1e-5))
print("all together are G:", torch.allclose(U @ torch.diag(S) @ Vt, G, atol=1e-5 * S[0].item()))

# %% [markdown]
# The **energy** of a direction is its singular value, squared. How many of the loudest carry half of it all?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
half = ...  # a whole number

# %% tags=["answer", "volatile"]
compare({"half": half}, {"half": lesson.half_of_energy(G)}, lesson.picture_of_gradient(G))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# energy = (S**2).cumsum(0) / (S**2).sum()
# half = int((energy < 0.5).sum()) + 1
# ```
#
# </details>

# %% [markdown]
# That curve is the **spectrum** of `G`. SGD moves along the first few directions and hardly touches the rest.
# But quiet need not mean unimportant: a rare word is quiet, too.
#
# ## Make them equally loud
#
# Orthogonalizing keeps the directions and sets every singular value to 1. Muon first averages gradients: that
# is momentum. Write both.
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def svd_update(G, buffer, momentum=0.95):
    # momentum: buffer becomes 0.95 of itself plus 0.05 of G, in place
    # Nesterov looks one step ahead: the same average again, of G (0.05) and the new buffer (0.95)
    # orthogonalize that with an SVD, and return it
    return ...

# %%
svd.check(svd_update)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
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
# What do the optimizers make of this gradient? "As it runs" is Newton–Schulz, lesson 02's subject: matrix
# products alone, and only nearly flat.

# %% tags=["volatile"]
orthogonalize = lesson.without_momentum(svd.accepted_or(lesson.svd_update))
lesson.explore(run, orthogonalize, live=widgets)

# %% [markdown]
# ## Why flat is good
#
# No step should move any input too far. So scale all updates until their loudest directions are equally loud.
# Who lowers the loss most? A gradient promises `(G * update).sum()`; the dark bars ran the model again.

# %% tags=["volatile"]
drops = lesson.loss_drops(run, orthogonalize)
lesson.picture_of_drops(drops)

# %% [markdown]
# Nothing under that limit promises more than `U @ Vt`. A direction with singular value `s` lowers the loss by
# `s` times the update's loudness there. So be as loud as allowed, everywhere:

# %% tags=["volatile"]
update = orthogonalize(G)
print(f"promised: {(G * update).sum():.5f}")
print(f"sum of the singular values: {S.sum():.5f}")
print(f"promised by G at the same limit: {(G * G / S[0]).sum():.5f}")

# %% [markdown]
# ## The whole update, once
#
# Three things are left. The **size factor** is the root of rows / columns of `W`, and at least 1: it makes an
# output move as far in a tall matrix as in a square one. **Weight decay** shrinks `W` by `lr * weight_decay`; it never
# meets the gradient, hence *decoupled*. Then the update is added. Here is each stage of one matrix
# (**RMS**, root mean square, is the usual size of an entry):

# %% tags=["volatile"]
print(lesson.say_stages(run))

# %% [markdown]
# Orthogonalizing forgets how long the gradient was. So the learning rate alone says how far a weight moves.
#
# Write it all. You are compared with `torch.optim.Muon`, to the last bit.
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def muon_step(W, G, buffer, lr, momentum=0.95, weight_decay=0.1):
    # 1 momentum, 2 Nesterov: as before (lerp and lerp_ round as torch does)
    # 3 orthogonalize, with zeropower_via_newtonschulz
    # 4 size factor, from W's shape
    # 5 weight decay: W shrinks by lr * weight_decay, in place
    # 6 add the update to W, in place: W.add_(update, alpha=…)
    return ...

# %%
whole.check(muon_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
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
# Now let your function train a model, beside PyTorch's:

# %% tags=["volatile"]
mine = lesson.train_with(whole.accepted_or(lesson.muon_step), steps + 1, seed)
torchs = lesson.train_with(None, steps + 1, seed)
print(f"your loss: {mine[0]:.2f} → {mine[-1]:.2f}")
print("the same as torch's, to the last bit:", mine == torchs)

# %% [markdown]
# ## Who gets it, and who does not
#
# Muon takes the hidden matrices, AdamW the rest:

# %%
split = split_parameters(run.model)
hidden, rest = split
print("Muon, in each block:", *[name for name in split.hidden_names if "blocks.0" in name], sep="\n  ")
print("AdamW:", *split.rest_names, sep="\n  ")

# %% [markdown]
# A norm's weight is a vector, so it has no directions to make equal. But the **embedding** and the **head**, first
# and last, are matrices. Why not those?
#
# The embedding is a table: a byte picks one row, and no input mixes rows. Adam keeps rows apart. Muon does
# not. Erase the gradient of the most frequent byte, and see whose updates change:

# %% tags=["volatile"]
lesson.picture_of_rows(lesson.erase_a_byte(run))

# %% [markdown]
# With Muon, what one byte learns hangs on another. Does that hurt? We tried, at every learning rate:

# %%
print(lesson.say_extra_lanes(race))

# %% [markdown]
# Here it even helps! So this is a rule of thumb, not a law. (AdamW's rate for embedding and head was tuned where
# AdamW steps everything, and not again beside Muon.) The reasons given are cost, as a table of 50,000 words is the
# largest matrix of all, and [experience](https://kellerjordan.github.io/posts/muon/#empirical-considerations): in
# long runs, AdamW did better on both.
#
# ## What would suit a table?
#
# A hidden layer's limit was its loudest direction. A table's inputs pick rows, so let no *row* be longer than
# 1. Which update promises most?
#
# (**Par**, as in golf, is what a good answer needs. Less is better.)
#
# *Hard · 8 minutes · optional · par 2 lines*

# %% tags=["stub"]
def table_update(G):
    # the largest (G * update).sum() with no row longer than 1
    # a byte that was never read has a row of zeros, which stays
    return ...

# %%
table.check(table_update)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def table_update(G):
#     lengths = G.norm(dim=1, keepdim=True)
#     return torch.where(lengths > 0, G / lengths, 0.0)
# ```
#
# </details>

# %% [markdown]
# ## What it costs on your machine
#
# On a CPU the SVD may well be faster. A GPU is built for products, and an SVD is a long chain of small steps:
# [far too slow](https://kellerjordan.github.io/posts/muon/) there, says the post.

# %% tags=["volatile"]
print(lesson.say_cost(G))

# %% [markdown]
# ## Recap
#
# - A gradient is loud in few directions. Muon makes all equally loud.
# - Of all updates whose loudest direction is equally loud, Muon's promises the most.
# - The update: momentum, Nesterov, orthogonalize, size factor, decay, add.
# - It is for hidden matrices. AdamW has embedding, head and norms.
#
# **Quiz.** One line measures each. 1% off is near enough.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "sum": ...,  # of all singular values of orthogonalize(G)
    "times": ...,  # G's loudest direction, as a multiple of the median one
    "factor": ...,  # the size factor of a weight of 400 rows and 100 columns
    "left_out": ...,  # entries of all parameters that AdamW has
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
# An SVD gives the right update, and is far too slow to run in every step. The next lesson does the same with a few
# matrix products.
