# %% [markdown]
# # 02 · How do a few matrix products do it?
#
# Muon wants all singular values at 1, and on a GPU an SVD is slow. How do five steps of plain matrix products bring
# them nearly there?

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
from muon_tutorial.learn import five_products as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty minutes.** At the end you can write Newton–Schulz, tell what it makes of a singular value without
# computing a matrix, bound all singular values at the end, and count its FLOPs.
#
# *You need* lesson 01: singular values, and `U @ Vt`. Everything runs in one process. No GPU, no network.
#
# - *Previous:* [01 · Why orthogonalize a gradient?](01_why_orthogonalize.ipynb)
# - *Next:* [03 · What does a collective move?](03_what_does_a_collective_move.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 02` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# Of the parameters below, this lesson uses `steps`, here those of Newton–Schulz (Muon takes five), and `widgets`.
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
import torch
from muon_tutorial.learn import five_products as lesson
from muon_tutorial.learn.inputs import recordings
from muon_tutorial.learn.widgets.reveal import compare
write, whole, bound, cost, lifting, quiz = lesson.all_exercises(steps)

# %% [markdown]
# ## Odd powers keep the directions
#
# **Newton–Schulz** lays a tall matrix on its side by transposing it, divides it by its **Frobenius norm** (the root
# of the sum of all squared entries), and then multiplies it with itself.

# %%
recorded = recordings.real_gradient()
print(recorded)
X = recorded.matrix.T / recorded.matrix.norm()
U, S, Vt = torch.linalg.svd(X, full_matrices=False)
print(f"{len(S)} singular values, from {S.min():.4f} to {S.max():.4f}")
print(f"the sum of their squares: {(S**2).sum():.4f}")

# %% [markdown]
# Since the squares add up to 1, no singular value is above 1.
#
# Call `X Xᵀ X` the third power of `X`, and write `U S Vᵀ` for each `X`. `VᵀV` and `UᵀU` are identities, so the
# directions stay, and each singular value is cubed:
#
# ```text
# X Xᵀ X  =  U S Vᵀ · V S Uᵀ · U S Vᵀ  =  U S³ Vᵀ
# ```

# %%
cubed = X @ X.T @ X
fifth = cubed @ X.T @ X
print("third power, values cubed:", torch.allclose(cubed, U @ torch.diag(S**3) @ Vt))
print("fifth power, to the fifth:", torch.allclose(fifth, U @ torch.diag(S**5) @ Vt))

# %% [markdown]
# So a sum of odd powers changes only the singular values. One **step** of Newton–Schulz is such a sum, with three
# numbers a, b and c:
#
# ```text
# a X + b X Xᵀ X + c X Xᵀ X Xᵀ X        s → a s + b s³ + c s⁵
# ```

# %%
a, b, c = lesson.KELLER_JORDAN
print(f"a = {a}, b = {b}, c = {c}")
for s in (0.001, 0.01, 0.1):
    print(f"{s} → {a * s + b * s**3 + c * s**5:.4f}")

# %% [markdown]
# A step makes quiet values about `a` times as large. But where is a value of 1 after one step, and does it come to
# rest after many?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
where = ...  # after one step, to one digit after the point
settles = ...  # a bool

# %% tags=["answer"]
compare({"where": where, "settles": settles}, lesson.outcome(), lesson.picture_of_one())

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# At s = 1 every power of s is 1, so a step leads to `a + b + c`.
#
# ```python
# where = round(a + b + c, 1)
# settles = False
# ```
#
# </details>

# %% [markdown]
# So values land only *near* 1. That is the price of a large `a`, which lifts quiet values fast.
#
# <details><summary>What would bring values to rest?</summary>
#
# A value at 1 stays there only if `a + b + c` is 1. Other values can settle only at an s that a step leaves
# unchanged, and only if `a s + b s³ + c s⁵` has a slope between −1 and 1 there.
#
# </details>
#
# ## Write one step
#
# As written above, a step takes six products. Three are enough. (**Par**, as in golf, is what a good answer needs.)
#
# <details><summary>Hint</summary>
#
# `X @ X.T` occurs in both longer terms. Compute it once, call it `A`, and write the step with `A` and `X` alone. Can
# `X` be taken out on the right?
#
# </details>
#
# *Medium · 5 minutes · required · par 3 products*

# %% tags=["stub"]
def step(X, a, b, c):
    # a X + b X Xᵀ X + c X Xᵀ X Xᵀ X, with as few @ as you can
    return ...

# %%
write.check(step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def step(X, a, b, c):
#     A = X @ X.T
#     B = torch.addmm(A, A, A, beta=b, alpha=c)  # b A + c A @ A, rounded once
#     return torch.addmm(X, B, X, beta=a)
# ```
#
# With `@` alone, `a * X + (b * A + c * A @ A) @ X` is right, too. But it rounds twice as often.
#
# </details>

# %% [markdown]
# ## Write all of it
#
# From here on you build an optimizer: an answer that gives the same bits as `torch.optim.Muon` is saved in
# `my_muon.py` beside this notebook, and in lesson 16 that file trains a GPT on real processes. Compute and return in
# the dtype of `G`, because lesson 16 gives it **bfloat16** (16 bits a number). `torch.addmm` rounds a product and a
# sum only once, so write both sums of your `step` with it to get torch's bits.
#
# <details><summary>Hint</summary>
#
# `torch.addmm(P, Q, R, beta=b, alpha=c)` is `b * P + c * Q @ R`, rounded once. Your step's first sum, call it `B`,
# comes from `A` alone. The second makes the new `X` from `X`, `B` and `X`.
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def newton_schulz(G, steps=5):
    # a tall G is laid on its side (G.T), so that X @ X.T is small; turn it back at the end
    # divide by the Frobenius norm, .clamp(min=1e-7), so that a gradient of zeros does not become NaN
    # your step, steps times, with a, b, c = 3.4445, -4.7750, 2.0315
    return ...

# %%
whole.check(newton_schulz)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `clamp` leaves the norm of a usual gradient as it is. If you add 1e-7 in its place, a small norm changes, and so do
# the bits.
#
# ```python
# def newton_schulz(G, steps=5):
#     tall = G.shape[0] > G.shape[1]
#     X = G.T if tall else G
#     X = X / X.norm().clamp(min=1e-7)
#     for _ in range(steps):
#         X = step(X, 3.4445, -4.7750, 2.0315)
#     return X.T if tall else X
# ```
#
# </details>

# %% [markdown]
# ## Under the microscope
#
# Each dot is a singular value:

# %%
lesson.microscope(live=widgets)

# %% [markdown]
# ## Bound the singular values
#
# Of values that begin between 0.01 and 1, what are the lowest and the highest after `steps` steps? Give two digits
# after the point.
#
# <details><summary>Hint</summary>
#
# The polynomial works on a whole tensor of starting values at once. `torch.linspace(0.01, 1, 100_001)` makes plenty
# of them.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
# many starting values, put through the polynomial, steps times
lowest, highest = ..., ...

# %%
bound.check(lowest, highest)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The polynomial rises and falls, so the lowest and the highest value need not come from the two ends, 0.01 and 1.
# That is why the code tries all starting values in between.
#
# ```python
# s = torch.linspace(0.01, 1, 100_001, dtype=torch.float64)
# for _ in range(steps):
#     s = a * s + b * s**3 + c * s**5
# lowest, highest = s.min().item(), s.max().item()
# ```
#
# Could an extreme hide between two of these starts? The slope of the polynomial, `a + 3 b s² + 5 c s⁴`, is zero only
# at 0.55, where a step leads to 1.20, and at 1.05, where it leads to 0.68. So over any range of starts, the lowest and
# highest results of a step come from an end of the range, or from 0.55 or 1.05 if they lie inside it. Begin with 0.01
# to 1, and go on with the new range after each step: 0.03 to 1.20, 0.12 to 1.20, 0.40 to 1.20, 0.68 to 1.20, and after
# five steps 0.68 to 1.13. These are the same bounds, without a sample.
#
# </details>

# %% [markdown]
# What if a value begins above 1?

# %%
print(lesson.say_starts((1.1, 1.2, 1.3, 1.5), steps))

# %% [markdown]
# A start at 1.3 explodes. That is why Newton–Schulz divides by the norm first.
#
# ## What does it cost?
#
# A product of `p × q` with `q × r` takes `2 p q r` **FLOPs**, a multiplication and an addition for each term. Count
# the FLOPs of Newton–Schulz for any matrix.
#
# <details><summary>Hint</summary>
#
# Lay a tall matrix on its side first. Then call the short side s and the long side l (lengths here, and no singular
# values). What are the shapes in each of a step's three products?
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def flops(m, n, steps=5):
    # the shorter side counts most: which one is it?
    return ...

# %%
cost.check(flops)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `X @ X.T` and `(…) @ X` take 2 s² l each, `A @ A` takes 2 s³, for the sides s ≤ l.
#
# ```python
# def flops(m, n, steps=5):
#     s, l = min(m, n), max(m, n)
#     return steps * (4 * s * s * l + 2 * s**3)
# ```
#
# </details>

# %% [markdown]
# <details><summary>What a GPU program of your own could save</summary>
#
# `X @ X.T` and `A @ A` are symmetric, so what stands above the diagonal stands below it, too. torch computes both
# halves. A program for the GPU, a *kernel*, can compute one half and write it twice. For a square matrix the three
# products take equally many FLOPs, so this saves up to a third. modded-nanogpt has [two such
# kernels](https://github.com/KellerJordan/modded-nanogpt/blob/000d247f34f20ed5b7ac45c25ca35209290d9dbd/triton_kernels.py)
# in Triton, whose [tutorials](https://triton-lang.org/main/getting-started/tutorials) begin with adding vectors.
#
# </details>
#
# Do more steps bring the result all the way to `U @ Vt`? (Distances are relative to the size of `U @ Vt`.)

# %% tags=["volatile"]
print(lesson.say_speed(recorded.matrix, steps))
print(lesson.say_speed(torch.randn(512, 1024), steps))
rows = lesson.measure_steps(recorded.matrix, steps + 3)
print(lesson.say_steps(rows, recorded.matrix))

# %% [markdown]
# No: the distance stays near 0.2, because the values never settle.
#
# ## Other numbers
#
# Other `a`, `b` and `c` have been published. How many steps does each triple take to lift a quiet value to a half?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def steps_needed(s, a, b, c):
    return ...  # how many steps until s is 0.5 or more; None if 20 are not enough

# %%
lifting.check(steps_needed)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def steps_needed(s, a, b, c):
#     for step in range(21):
#         if s >= 0.5:
#             return step
#         s = a * s + b * s**3 + c * s**5
#     return None
# ```
#
# </details>

# %%
steps_needed = lifting.accepted_or(lesson.steps_needed)
for name, triple in {"Keller Jordan's numbers, Muon's": (a, b, c), "numbers that settle at 1": (2, -1.5, 0.5)}.items():
    print(f"{name}: {steps_needed(0.001, *triple)} steps for 0.001")
print(lesson.say_published())  # after five steps; the mean is over this gradient's values

# %% [markdown]
# Directions need only be *about* equally loud, so what counts is lifting the quiet ones. Polar Express and CANS
# lift most: their numbers change from step to step, and the first `a` is above 8.
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Odd powers keep the directions. A step moves each singular value `s` by itself, to `a s + b s³ + c s⁵`.
# - At Frobenius norm 1 no value begins above 1. Quiet values grow by `a` in each step, and loud ones swing about 1.
# - A step is three products, `4 s² l + 2 s³` FLOPs for sides s ≤ l. A step never looks for a direction.
#
# </details>
#
# **Quiz.** 1% off is near enough.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "growth": ...,  # a value begins at 0.000001: how many times as large after all steps?
    "products": ...,  # matrix products in all steps
    "gflop": ...,  # for a 3072 × 768 matrix, in units of 1e9
    # a matrix has four equal singular values: how large is each after the division by the Frobenius norm?
    "norm": ...,
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# For so small an s, s³ and s⁵ are next to nothing, so each step multiplies it by a. Four equal squares add up to 1, so
# each of them is a quarter, and the value itself is a half.
#
# ```python
# gflop = steps * (4 * 768**2 * 3072 + 2 * 768**3) / 1e9
# answers = {"growth": a**steps, "products": 3 * steps, "gflop": gflop, "norm": (1 / 4) ** 0.5}
# ```
#
# </details>

# %% [markdown]
# ## Your function meets the gradient
#
# Your function turns `X` into `Y`. If only singular values have moved, `U.T @ Y @ Vt.T` is diagonal:

# %% tags=["volatile"]
orthogonalize = whole.accepted_or(lesson.newton_schulz)
Y = orthogonalize(X, steps)
inside = U.T @ Y @ Vt.T
off_diagonal = inside - torch.diag(inside.diag())
print(f"largest entry off the diagonal: {off_diagonal.abs().max():.0e}")
print("only singular values have moved:", lesson.only_values_moved(X, Y))

# %% [markdown]
# Your bounds are for values that begin at 0.01 or above. A few of `S` begin lower. How many of these end within the
# bounds, too?
#
# <details><summary>Hint</summary>
#
# `S.min()` is the quietest. Put it through your polynomial, `steps` times.
#
# </details>
#
# *Medium · 3 minutes · required*

# %% tags=["stub", "predict"]
keep = ...  # of the (S < 0.01).sum() values

# %% tags=["answer"]
low, high = lesson.bounds_after(steps)
ends = inside.diag()[S < 0.01]
compare({"keep": keep}, {"keep": int(((ends > low) & (ends < high)).sum())})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# After five steps, all three of them. Each step makes a quiet value more than three times as large, so after four even
# the quietest is loud, and from there no value falls below your bounds.
#
# ```python
# quiet = S[S < 0.01]
# for step in range(steps):
#     quiet = a * quiet + b * quiet**3 + c * quiet**5
# low, high = lesson.bounds_after(steps)
# keep = int(((quiet > low) & (quiet < high)).sum())
# ```
#
# </details>

# %% [markdown]
# Before several processes can share this work they must send tensors, and the next lesson asks what that costs.
#
# *Read on:* [The Polar Express](https://arxiv.org/abs/2505.16932)
