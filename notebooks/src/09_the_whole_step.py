# %% [markdown]
# # 09 · The whole step, and its opposite arrows
#
# **Forty minutes.** At the end you can name the seven phases of a distributed Muon step, say what each of
# them sends, and write the way back from the way out. And an optimizer with your own functions in it has run
# on real processes.
#
# *You need* lesson 05 (a rank owns a range) and lesson 07 (cuts). The names reduce_scatter and all_gather
# are from lesson 03.
#
# - *Previous:* [08 · What happens if each shard is orthogonalized alone?](08_each_shard_alone.ipynb)
# - *Next:* [11 · How do I plug in my own sharding?](11_my_own_sharding.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 09` makes. It has
#   nothing to install.
#
# *Other grids:* change dp as you like; tp can be 1, 2 or 4.

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
steps: int = 3
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import inspect
import torch
from muon_tutorial import Grid, LocalWorld, launch, zeropower_via_newtonschulz
from muon_tutorial.engine.hops import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.plan.layout import Route
from muon_tutorial.learn import the_mirror as lesson
from muon_tutorial.learn.the_mirror import replay

# %% [markdown]
# ## One step, and its mirror
#
# This is a recording of one real step, taken on real processes, of one matrix in a small GPT. Each row is a
# rank (they stand in a grid: dp counts its lines, tp the places in a line). Each column is a moment. The arrows
# on top are the seven **phases** between the moments. A colour and a number say which rank *brought* that
# part. Grey is what a rank does not hold.
#
# Read the columns from the left up to the dashed line. Then read them from the right.

# %%
plan = lesson.plan_of(dp, tp)
mirror, back, shapes, loop, quiz = lesson.all_exercises(plan)
replay.film(replay.load())

# %% [markdown]
# Both ways you pass the same boxes. Only the outermost columns differ in colour: on the left each rank has a
# gradient of its own, on the right all copies along dp have the same parts. (What the hatching means follows
# in a moment.) These are the phases:
#
# | way out | | way back | |
# |---|---|---|---|
# | 1 reduce_scatter | average the gradients over dp; each rank keeps its own range of the mean | 7 all_gather | the new weights of all ranges, over dp, to all |
# | 2 dp gather | all ranges, over dp | 6 dp slice | keep my range |
# | 3 tp gather | all tp pieces: the matrix is whole | 5 tp slice | keep my piece |
# | 4 Newton–Schulz | in one place, on the whole matrix | | |
#
# Where is the momentum? A rank keeps that of its own range only (lesson 05). After phase 1 it adds its range of
# the mean gradient to it, and what comes out travels on, from phase 2 to Newton–Schulz. Before phase 7 it steps
# its own range of the weight.
#
# ## Predict
#
# Which phase undoes 1, which 2, which 3? And which of the seven send nothing at all, on your grid?
# (Along an axis of length 1 there is nobody to send to.)
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
undoes = ...  # such as {1: 4, 2: 5, 3: 6}
silent = ...  # a list of phases, such as [1, 2]

# %%
mirror.check(undoes, silent)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# To gather you must ask others for what you lack. To slice you only forget what is not yours.
#
# ```python
# undoes = {1: 7, 2: 6, 3: 5}
# silent = [4, 5, 6] + ([1, 2, 7] if dp == 1 else []) + ([3] if tp == 1 else [])
# ```
#
# </details>

# %% [markdown]
# ## Stop between two requests
#
# Real processes do not wait for you to look. So here is a **stepping world**: all ranks live in this
# notebook, each as a Python generator. A rank runs until it needs something from others. Then it *yields* a
# request and stands still, until the world has answered.
#
# We let the world answer one request. The ranks that are listed below it stand and wait.

# %%
world = LocalWorld(Grid.of(dp=dp, tp=tp))
world.start([lesson.program(world.mesh(rank), seed) for rank in world.grid.ranks])
answered = lesson.requests(world)
print(next(answered))
for rank, asked in world.pending.items():
    print(f"  rank {rank} waits: {asked.kind} over {asked.axes[0]}")

# %% [markdown]
# That was a small sum before the phases: does every rank have its gradients, and are they finite?
# Now the rest of the step. The matrices are called up, o and down. Find the phases, and the ones that are
# not there. (An `all_gather` over dp appears in phase 2 and in phase 7: its numbers differ, its kind does not.)

# %%
print(*answered, sep="\n")

# %% [markdown]
# Two things to see. No group waits for another one: some ranks may be in phase 2 before others are in phase 1.
# And in phase 3 a rank asks only for the matrices it works on: those of which its own range has a part. A
# matrix that a boundary between two ranges cuts is orthogonalized on both sides.
#
# ## Whose numbers are these?
#
# Let us send names in place of numbers: each rank fills its range with its own rank, and walks phases 2, 3,
# 5 and 6, with no Newton–Schulz in the middle. What does it get back?

# %%
walk = lesson.trace(dp, tp)
home = LocalWorld(Grid.of(dp=dp, tp=tp)).run([walk(rank) for rank in range(dp * tp)])
print(lesson.say_home(plan, home))

# %% [markdown]
# Each rank got back what it had sent, and nothing else. That is what "opposite" means.
#
# With Newton–Schulz in the middle this changes. It multiplies the matrix by itself, so that *every* number of
# the result depends on *every* number that came in. From phase 4 on, a part has no single sender: it is made
# from the whole matrix. The pictures hatch it; its colour now says who will keep it.
#
# Here is your grid, and beside each moment its mirror. Move the slider from 0 to 7.

# %%
replay.explore(lesson.record_here(dp, tp, seed), live=widgets, moment=4)

# %% [markdown]
# ## The way out, as code
#
# The package keeps the way out as data, a **route**: a list of **hops**. A hop says how one axis holds a
# tensor before and after (`Shard` is cut, `Replicate` is whole on all ranks). `take` carries a tensor over
# one hop; `at` says which rank this is, `label` what to call the request. This is the package's own code, read
# from it just now; `yield from` means: ask, and wait for the answer.

# %%
print(inspect.getsource(travel))

# %% [markdown]
# ## Write the way back
#
# Phases 5 and 6 are one function, the opposite of `travel`. Every hop has an opposite, too: `hop.inverse`.
# The stub is `travel` with a hole; the hole is not all that has to change. Think of coming home: shoes that
# you put on last, you take off first.
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def way_back(x, route, at, label):
    for hop in ...:
        x = yield from take(x, hop, route.dtype, at, label)
    return x

# %%
back.check(way_back)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def way_back(x, route, at, label):
#     for hop in reversed(route.hops):
#         x = yield from take(x, hop.inverse, route.dtype, at, label)
#     return x
# ```
#
# </details>

# %% [markdown]
# Compare yours with the package's own. It turns the route around and travels that: `travel(x, route.inverse, at,
# label)`.

# %%
print(inspect.getsource(Route.inverse.func))

# %% [markdown]
# ## A bug: the matrix that was flat
#
# The blueprint behind this lesson is a published script of this very step. Its author lists five bugs that
# had to be found. One sits before phase 3. What travels is flat: one long row of numbers, matrix after
# matrix. The script cut out its part with `.view(-1)`, which leaves it flat. Newton–Schulz answers:

# %%
print(lesson.error_of(zeropower_via_newtonschulz, torch.ones(8).view(-1)))

# %% [markdown]
# Mend it. `meta` is the matrix's line of the master plan: `global_range` says where it lies in `flat`.
# Which of its fields says what shape *this rank's* piece has? You can look at one:

# %%
print(plan.dist_meta(plan.grid.at(0))[0])

# %% [markdown]
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def unpack(flat, meta):
    start, stop = meta.global_range
    return flat[start:stop].view(...)

# %%
shapes.check(unpack)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `global_shape` is the whole matrix. Before the tp gather there is only this rank's piece. (Where tp cuts the
# matrix, the package's tp gather happens to give a flat piece its shape back. With `tp = 1` nothing does.)
#
# ```python
# def unpack(flat, meta):
#     start, stop = meta.global_range
#     return flat[start:stop].view(meta.shape)
# ```
#
# </details>

# %% [markdown]
# ## A bug: the loop that lost its parameters
#
# Before phase 7 each rank steps its own ranges. The blueprint's loop lacked a line. Here it is, and what it
# says when it runs:

# %%
print(lesson.BLUEPRINT_LOOP, lesson.blueprint_error(), sep="\n")

# %% [markdown]
# This is the kind case. Had an earlier loop left a variable `params` behind, there would be no error: every
# group would step the parameters of that other loop. Write the missing line.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def update_loop(param_groups, update):
    for group in param_groups:
        params = ...
        for param in params:
            update(param, group)

# %%
loop.check(update_loop)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def update_loop(param_groups, update):
#     for group in param_groups:
#         params = group["params"]
#         for param in params:
#             update(param, group)
# ```
#
# </details>

# %% [markdown]
# The other three are about the machine, not the step:
#
# | in the script | what a laptop's PyTorch says | here |
# |---|---|---|
# | `init_process_group("nccl")` | `RuntimeError: Distributed package doesn't have NCCL built in` | the backend is a parameter, `"gloo"` |
# | `device="cuda"` | `AssertionError: Torch not compiled with CUDA enabled` | tensors are made where the weights are |
# | `mp.spawn` of a function from a cell | `AttributeError: Can't get attribute 'worker' on <module '__main__' (built-in)>` | `launch` sends the function's source along |
#
# ## Your optimizer
#
# Now all seven phases, with your functions in their places. `job` does the arithmetic in between (momentum,
# Newton–Schulz, weight decay). Everything that moves is in the second cell below. `travel` takes whatever route it
# is given: that of phase 1 is one hop, a reduce_scatter. Matrices that this rank does not work on stay zero
# in `done`; its own range has none of them.

# %%
way_back = back.accepted_or(lesson.way_back)
unpack = shapes.accepted_or(lesson.unpack)
update_loop = loop.accepted_or(lesson.update_loop)

# %%
def my_step(job, bucket, at):
    summed = yield from travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
    flat = yield from travel(job.momentum(bucket, summed), bucket.compute, at, job.label(2))
    done = torch.zeros_like(flat)
    for entry, meta in job.matrices(bucket):
        whole = yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))
        update = job.newton_schulz(entry, whole)  # phase 4
        piece = yield from way_back(update, entry.route, at, job.label(5, entry))
        done[slice(*meta.global_range)] = piece.flatten()
    kept = yield from way_back(done, bucket.compute, at, job.label(6))
    stepped = job.apply(bucket, kept, update_loop)
    fresh = yield from travel(stepped, bucket.parameter, at, job.label(7))
    job.write(bucket, fresh)

# %% [markdown]
# First in the stepping world, beside the package's own step. What each rank asks for is compared, bit by bit.
# If you change something in the cell above, you see here which rank's request goes wrong first, and where.

# %%
print(lesson.first_difference(my_step, dp, tp, seed))

# %% [markdown]
# ## On real processes
#
# The same cell, unchanged. The ranks first send their names along your grid's routes, for the picture. Then
# they take the step.

# %%
def run_mine(rank):
    return lesson.job(rank, dp, tp, seed).run(my_step)

reports = launch(run_mine, dp * tp, backend=backend)
replay.explore(lesson.recording_of(reports, dp, tp), live=widgets)

# %% [markdown]
# ## To the bit
#
# Take the gradients as phase 1 left them, put together from all ranges. Give them to PyTorch's own
# `torch.optim.Muon`, in one process. Compare its weights with those of your ranks.

# %%
gradients, after = lesson.whole_gradients(plan, reports), lesson.whole_weights(plan, reports)
alone = lesson.step_alone(gradients, seed)
print("numbers that differ:", lesson.different_bits(after, alone))

# %% [markdown]
# ## The one phase that rounds
#
# For the *same* gradient, the answer is the same. But is the gradient itself? Phase 1 adds numbers of several
# ranks, and each addition rounds. Another order of adding may round differently.
#
# How far off can it be? A mean over dp takes dp − 1 additions and one division. Each is off by at most a part
# u of its result. In fp32, u is 2⁻²⁴. No partial sum is larger than the sum of the absolute values. So:
#
# `error ≤ γ · (|g₀| + |g₁| + …) / dp`, with `γ = dp · u / (1 − dp · u)`
#
# Here is the error of your run, against the exact mean in float64. In parts of its bound it cannot exceed 1.

# %% tags=["volatile"]
print(lesson.say_sum(gradients, after, seed, dp))

# %% [markdown]
# Two numbers have only one sum. With more of them the order counts. Here gradients of eight texts are added in
# several orders, and each sum is followed by one step in one process.

# %% tags=["volatile"]
print(lesson.say_orders(seed, texts=8))

# %% [markdown]
# Most often the gradients differ and the weights do not. Newton–Schulz works in bfloat16, which keeps only 8
# bits of each number: a change in the last bits of fp32 is rounded away. Unless it crosses a rounding edge.
# Let us move one single number over its edge:

# %% tags=["volatile"]
print(lesson.say_nudge(gradients, seed))

# %% [markdown]
# A tiny change of one number, and most of a matrix of weights moves by far more. So if two runs differ in how
# they add gradients, expect the same weights at first, and then suddenly not. That is no mistake of the
# distributed step: no other process was involved here.
#
# Now other texts on your ranks. Does the bound hold?

# %% tags=["volatile"]
texts = range(seed + 1, seed + 1 + steps)

def run_texts(rank):
    return [lesson.job(rank, dp, tp, text).run(my_step) for text in texts]

runs = launch(run_texts, dp * tp, backend=backend)
for number, text in enumerate(texts):
    found = lesson.whole_gradients(plan, [run[number] for run in runs])
    error = lesson.sum_error(found, text, dp)
    print(f"text {text}: {error.rounded} of {error.count} rounded, {error.of_bound:.3f} of the bound")

# %% [markdown]
# ## Recap
#
# - Seven phases: reduce_scatter, dp gather, tp gather, Newton–Schulz, tp slice, dp slice, all_gather.
# - The way back is the way out, read backwards: the same hops, last one first, each the other way.
# - Outward the ranks must ask. Backward they only forget, until the new weights go to all.
# - For the same full gradient the result is that of one process, to the bit. The sum over dp alone may round
# differently, within a bound you can compute.
#
# **Quiz.** Answer with numbers.
#
# 1. `requests`: how many requests did rank 0 make in the seven phases? (Its `reports[0].diary` has noted them.)
# 2. `whole`: on how many ranks is the matrix o whole at Newton–Schulz?
# 3. `different`: how many weights of your step differ from those of one process with the same gradient?

# %% tags=["stub"]
answers = {"requests": ..., "whole": ..., "different": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# asked = len(reports[0].diary.sent)
# whole = sum(bool(report.diary.tiles["o"][4]) for report in reports)
# answers = {"requests": asked, "whole": whole, "different": lesson.different_bits(after, alone)}
# ```
#
# </details>
