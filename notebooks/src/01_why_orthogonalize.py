# %% [markdown]
# # 01 · Why orthogonalize a gradient?
#
# **Fifteen minutes.** At the end you can say what the singular values of an update tell, write Muon's update
# in two lines, and say which matrices of a model it is for, and which not.
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
# All lessons begin with the same parameters. This one uses `steps`, the steps of training before we look,
# `seed` and `widgets`.

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
steps: int = 40
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import torch
from muon_tutorial import split_parameters
from muon_tutorial.learn import why_muon as lesson
from muon_tutorial.learn.inputs import measure, small_gpt

# %% [markdown]
# ## Loud and quiet directions
#
# A layer computes `W @ x`. An optimizer changes its weight to `W - lr * update`. So the layer's output moves
# by `lr * update @ x`, and how far depends on where `x` points.
#
# Take every input `x` of length 1. If `x` has two numbers, that is a circle. The update turns the circle into
# an ellipse: inputs along one direction are moved far, inputs along another hardly. We call the first
# direction *loud* and the other *quiet*. How long their arrows are in the ellipse, those are the **singular
# values** of the update.
#
# On the right, the same update after Muon's special step. The directions are the same. Both are equally loud.

# %%
lesson.picture_of_circle()

# %% [markdown]
# ## The gradient of a real model
#
# An update of a real layer has more directions, as many as its shorter side. To see one, train a small GPT
# for some steps on text that every machine with Python has, and take the next gradient.

# %% tags=["volatile"]
run, seconds = measure.timed(lambda: small_gpt.train(steps, seed))
G = run.gradients[lesson.EXAMPLE]
guess, write, quiz = lesson.guess_half(G), lesson.write_muon(), lesson.quiz(run, G)
print(lesson.say_run(run, steps, seconds))

# %% [markdown]
# The **SVD** (singular value decomposition) takes a matrix apart into its directions. Direction `i` reads the
# input along row `i` of `Vt`, makes it `S[i]` times as loud, and writes it to the output along column `i` of
# `U`. The sum of all directions is the matrix again.

# %%
U, S, Vt = torch.linalg.svd(G, full_matrices=False)
print("directions:", len(S))
print("together they are G again:", torch.allclose(U @ torch.diag(S) @ Vt, G, atol=1e-5 * S[0].item()))

# %% [markdown]
# ## Predict
#
# The **energy** of a direction is its singular value, squared. All energies together are the sum of the squares
# of all numbers in `G`. If all directions were equally loud, half of them would carry half of the energy.
#
# How many of the loudest directions carry half of the energy of this gradient? Guess first. Then count.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
half = ...  # a whole number

# %%
guess.check(half)

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
# All singular values of a matrix, sorted, are its **spectrum**. Guess how steep that of `G` is, and only then
# press *Reveal*. The scale is logarithmic: each level line is ten times quieter than the one above it.

# %% tags=["volatile"]
lesson.predict_ratio(G, live=widgets)

# %% [markdown]
# A gradient speaks in few directions. Plain gradient descent makes its steps in these few, and hardly moves
# along the others. Yet quiet need not mean unimportant: a rare word is quiet, too.
#
# ## Write Muon's update
#
# Muon keeps the directions and makes all of them equally loud: the same `U` and `Vt`, but every singular
# value 1. That is to *orthogonalize* the gradient.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def svd_muon(G):
    U, S, Vt = torch.linalg.svd(G, full_matrices=False)
    return ...

# %%
write.check(svd_muon)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def svd_muon(G):
#     U, S, Vt = torch.linalg.svd(G, full_matrices=False)
#     return U @ Vt
# ```
#
# </details>

# %% [markdown]
# ## Three optimizers, one gradient
#
# - **SGD**: the update is the gradient.
# - **Adam**: each number of the gradient is divided by its usual size over the last steps. It looks at
# numbers one by one and knows nothing of directions.
# - **Muon**: what you wrote (exact), and what it computes in practice (as it runs). The second is much
# cheaper and only nearly flat; lesson 02 is about it.
#
# Real optimizers also average gradients over steps, the momentum. We leave it out, so that all see the
# same gradient. Choose a matrix of the model: `up` and `down` are those of the MLP, `q`, `k`, `v` and `o`
# those of the attention.

# %% tags=["volatile"]
orthogonalize = write.accepted_or(lesson.svd_muon)
lesson.explore(run, orthogonalize, live=widgets)

# %% [markdown]
# ## What is it good for?
#
# A step should not upset the model: whatever the input, the output of a layer should not move too far. So give
# all updates the same limit: scale each until its loudest direction is equally loud. How far does the loss on
# this batch fall?
#
# The pale bar is what the gradient promises: multiply each number of the gradient with the same number of the
# scaled update, and add up. The dark bar is measured: the model runs again, its hidden matrices changed.

# %% tags=["volatile"]
drops = lesson.loss_drops(run, orthogonalize)
lesson.picture_of_drops(drops)

# %% [markdown]
# Under that limit, no update can promise more than the exact `U @ Vt`. The reason is short. In a direction of
# the gradient with singular value `s`, the loss falls by `s` times the update's loudness there. The limit
# allows loudness 1. So use it in every direction: the promise is then the sum of all singular values.

# %% tags=["volatile"]
update = orthogonalize(G)
print(f"promised: {(G * update).sum():.5f}   sum of the singular values: {S.sum():.5f}")

# %% [markdown]
# That holds for one small step on one batch. Whether long training runs gain from it, only long runs can
# tell; [Keller Jordan's post](https://kellerjordan.github.io/posts/muon/) reports some.
#
# ## What is left out
#
# Muon does not get all parameters of the model. `hidden` are the matrices that it takes, in a group ready for
# the optimizer; `rest` is left to AdamW.

# %%
split = split_parameters(run.model)
hidden, rest = split
print("Muon, in each block:", *[name for name in split.hidden_names if "blocks.0" in name], sep="\n  ")
print("AdamW:", *split.rest_names, sep="\n  ")

# %% [markdown]
# The norms' weights are no matrices: they have no directions. But the **embedding** is one. Its input is a
# byte, and the byte picks one row. No input ever mixes rows, as inputs of a hidden layer do. So the
# directions of the whole table say little, and what counts is the length of each row.
#
# Each point is a byte of the batch. SGD moves frequent bytes far and rare ones hardly. Adam evens that out,
# number by number. Muon does so, too, but with products over the whole table, the largest matrix of many
# models, and what one byte gets depends on all others.

# %% tags=["volatile"]
lesson.picture_of_rows(run)

# %% [markdown]
# For the embedding, then, Muon pays more for what Adam does well enough. For the **head**, the last matrix,
# there is no such argument: it was
# [tried out](https://kellerjordan.github.io/posts/muon/#empirical-considerations), and AdamW did better.
#
# ## What it costs on your machine
#
# The exact way takes an SVD of every matrix in every step. Compare it with what Muon runs in practice.

# %% tags=["volatile"]
print(lesson.say_cost(G))

# %% [markdown]
# ## Recap
#
# - A matrix has directions, and singular values that say how loud each is.
# - A gradient speaks in few directions. Muon makes all equally loud and keeps where they point.
# - Among updates whose loudest direction is equally loud, the orthogonalized one promises the most.
# - It is for hidden matrices. Embedding, head and norms stay with AdamW.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above. 1% off is near enough.
#
# 1. `sum`: what is the sum of all singular values of `orthogonalize(G)`, your function or the reference?
# 2. `times`: how many times as loud as the median direction of `G` is its loudest?
# 3. `left_out`: how many numbers of the model are left to AdamW?

# %% tags=["stub"]
answers = {"sum": ..., "times": ..., "left_out": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# left_out = sum(parameter.numel() for _, parameter in rest)
# answers = {"sum": len(S), "times": (S[0] / S.median()).item(), "left_out": left_out}
# ```
#
# </details>
