# %% [markdown]
# # 02 · How do five matrix products do it?
#
# **Twenty minutes.** At the end you can write one step of Newton–Schulz, foretell where it brings a singular
# value without any matrix, and bound where all of them end.
#
# *You need* lesson 01: singular values, and `U @ Vt`. Everything runs in one process. No GPU, no network.
#
# - *Previous:* [01 · Why orthogonalize a gradient?](01_why_orthogonalize.ipynb)
# - *Next:* [03 · What does a collective move?](03_what_does_a_collective_move.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 02` makes. It has
#   nothing to install.
#
# All lessons begin with the same parameters. This one uses `steps`, here the steps of Newton–Schulz (Muon's
# usual number is five), and `widgets`.

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
import torch
from muon_tutorial.learn import five_products as lesson
from muon_tutorial.learn.inputs import recordings

# %% [markdown]
# ## Without an SVD
#
# Muon wants the directions of a gradient, all equally loud. An SVD looks for the directions, and is slow for
# large matrices, as lesson 01 has measured. **Newton–Schulz** looks for none. It multiplies the matrix with
# itself, and the quiet directions come up. The five of the title are its steps. Each is three products.
#
# The matrix here is a gradient from real training. It was recorded, and comes with the package.

# %%
recorded = recordings.real_gradient()
write, guess = lesson.write_step(), lesson.guess_one()
bound, quiz = lesson.bound_values(steps), lesson.quiz(steps)
print(recorded)
lesson.picture_before_after(recorded.matrix, steps)

# %% [markdown]
# ## Odd powers keep the directions
#
# First the matrix is laid on its longer side (then the products are small) and divided by its **Frobenius
# norm**: the root of the sum of the squares of all its numbers. That is also the root of the sum of the
# squares of all singular values. So afterwards none of them is above 1.

# %%
X = recorded.matrix.T / recorded.matrix.norm()
U, S, Vt = torch.linalg.svd(X, full_matrices=False)
print(f"{len(S)} singular values, from {S.min():.4f} to {S.max():.4f}")

# %% [markdown]
# Now look at `X @ X.T @ X`, the matrix to the third power. With `U S Vᵀ` in place of `X` it is
# `U S Vᵀ · V S Uᵀ · U S Vᵀ`. Where two parts meet, `Vᵀ V` and `Uᵀ U` are the identity and drop out. `U S³ Vᵀ`
# is left. The directions are the same. Only the singular values have moved, each to its cube.

# %%
cubed = X @ X.T @ X
print("same directions, values cubed:", torch.allclose(cubed, U @ torch.diag(S**3) @ Vt))

# %% [markdown]
# The same holds for the fifth power, and for sums of odd powers. So with three numbers `a`, `b`, `c`, the
# matrix `a X + b X Xᵀ X + c X Xᵀ X Xᵀ X` has the directions of `X`, and a singular value `s` goes to
#
# `a * s + b * s**3 + c * s**5`
#
# That is one **step**. These are Muon's three numbers.

# %%
a, b, c = lesson.KELLER_JORDAN
print(f"a = {a}, b = {b}, c = {c}")

# %% [markdown]
# ## Predict
#
# Take a singular value that is perfect already: exactly 1. Where is it after one step?
#
# *Easy · 1 minute · required*

# %% tags=["stub"]
where = ...  # a number

# %%
guess.check(where)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# where = a + b + c
# ```
#
# </details>

# %% [markdown]
# ## Write one step
#
# Multiply as little as you can. With `A = X @ X.T`, a step is `a X + (b A + c A A) X`.
#
# *Easy · 5 minutes · required*

# %% tags=["stub"]
def step(X, a, b, c):
    A = X @ X.T
    return ...

# %%
write.check(step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def step(X, a, b, c):
#     A = X @ X.T
#     return a * X + (b * A + c * A @ A) @ X
# ```
#
# </details>

# %% [markdown]
# This is all of Newton–Schulz: your step, `steps` times. Is it true that only the singular values have moved?
# Then `U.T @ Y @ Vt.T` has them on its diagonal, and zeros everywhere else.

# %%
one_step = write.accepted_or(lesson.newton_schulz_step)
Y = X
for _ in range(steps):
    Y = one_step(Y, a, b, c)
print("only singular values have moved:", lesson.only_values_moved(X, Y))

# %% [markdown]
# ## Under the microscope
#
# No matrix is needed to see what happens. The curve is the polynomial, put into itself once for each step.
# On it, each singular value is a dot: from left to right where it began, upwards where it is now. Follow one
# dot from step to step. With a running kernel there are a slider and other spectra to choose from: the
# recorded gradient, random matrices, and a steep one.
#
# - A quiet value is multiplied by `a` in each step: it climbs.
# - A loud one comes down, then up again. It swings about 1 and does not settle there.
# - The green band is where most of them end. Those that began too quiet do not get that far.

# %%
lesson.microscope(live=widgets)

# %% [markdown]
# ## Bound the singular values
#
# Take all values that begin between 0.01 and 1. Between which two numbers are they after `steps` steps? The
# picture gives you an idea (leave out what begins below 0.01). Then compute the tightest bounds, to two digits
# after the point: many starting values, put through the polynomial `steps` times.
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
lowest, highest = ..., ...

# %%
bound.check(lowest, highest)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Many starting values, put through the polynomial.
#
# ```python
# s = torch.linspace(0.01, 1, 100_001, dtype=torch.float64)
# for _ in range(steps):
#     s = a * s + b * s**3 + c * s**5
# lowest, highest = s.min().item(), s.max().item()
# ```
#
# </details>

# %% [markdown]
# A bound is a promise. Does the real gradient keep it? Those that began below 0.01 were promised nothing.

# %%
print(lesson.say_bounds(X, Y, lesson.bounds_after(steps)))

# %% [markdown]
# Is it bad that they do not end at 1? An update needs its directions only about equally loud. So the three
# numbers were chosen with a large `a`, which lifts quiet values fast. The price is that the loud ones swing
# ([Keller Jordan's post](https://kellerjordan.github.io/posts/muon/) tells how they were found).
#
# ## Error and time on your machine
#
# Muon runs it in **bfloat16**: numbers of 16 bits in place of 32, of about three digits. The distance is the
# norm of the difference from `U @ Vt`, as a part of the norm of `U @ Vt`. Each step costs time. Do more steps
# bring the distance to zero?

# %% tags=["volatile"]
rows = lesson.measure_steps(recorded.matrix, steps + 3)
print(lesson.say_steps(rows, recorded.matrix))

# %% [markdown]
# ## Optional: other numbers
#
# Others have looked for better `a`, `b` and `c`, with other numbers in each of the five steps. The lesson is
# complete without them. Open the fold to compare: who lifts the quiet ones fastest, who swings least?

# %%
lesson.FoldedPicture("Four sets of coefficients", lesson.picture_of_variants())

# %% [markdown]
# ## Recap
#
# - Odd powers of a matrix keep its directions. A step moves singular values only, each by itself.
# - Quiet values grow by `a` in each step, and the loud swing about 1.
# - Five steps bring most of them near 1, and not to 1. What begins very quiet stays behind.
# - A step is three matrix products, what GPUs are built for. There is no search for directions.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above. 1% off is near enough.
#
# 1. `one`: where is a singular value of exactly 1 after one step?
# 2. `growth`: a singular value begins at 0.000001. How many times as large is it after `steps` steps?
# 3. `products`: how many matrix products are `steps` steps?

# %% tags=["stub"]
answers = {"one": ..., "growth": ..., "products": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answers = {"one": a + b + c, "growth": a**steps, "products": 3 * steps}
# ```
#
# </details>
