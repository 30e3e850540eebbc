# %% [markdown]
# # 05 · ZeRO-1 and the virtual buffer
#
# **Twenty minutes.** At the end you can say, for any matrix, which numbers of its momentum a rank keeps, and
# where they lie in its memory. And your own function has found them on real processes.
#
# *You need* lesson 00 (ranks) and lesson 03 (what a collective moves). No knowledge of ZeRO.
#
# - *Previous:* [04 · How did the first distributed Muon work?](04_the_first_distributed_muon.ipynb)
# - *Next:* [06 · Which ranks belong together?](06_the_grid.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 05` makes. It has
#   nothing to install.
#
# *Other grids:* change dp and bucket as you like. With tp above 1, the rulers show what the ranks at the first
# place along tp hold.

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
dp: int = 4
tp: int = 1
bucket: int = 400
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.learn import zero1_buffer as lesson

# %% [markdown]
# ## Three rulers
#
# A small model has matrices A to E. For each, Muon keeps a momentum of the same size: an average of past
# gradients. `dp` ranks train the model together, each on other data. If each kept the whole momentum, all
# copies but one would be a waste of memory.
#
# **ZeRO-1** wastes nothing: every number of the momentum is kept by one rank. (The 1: of all that training
# keeps, only the optimizer's memory is cut. The weights stay copies.) But which rank? Here are three rulers
# over the same numbers. Colours in the last one are ranks.

# %%
plan = lesson.plan_of(dp, tp, bucket)
split, ranges, quiz = lesson.all_exercises(plan)
lesson.explore(plan, bucket, live=widgets)

# %% [markdown]
# From top to bottom:
#
# 1. *Matrices.* Written out flat, row after row, one after the other.
# 2. *Buckets.* What travels together. A **bucket** takes matrices until the next one would make it larger than
# the number `bucket`; a matrix that is larger itself gets a bucket of its own. The rest is filled up with
# **padding**, numbers that mean nothing, until dp divides the length.
# 3. *Slices.* Each bucket is cut into dp equal parts. Rank 0 keeps the first part *of every bucket*, rank 1
#    the second, and so on.
#
# The buttons and the slider change `bucket` and `dp`, in the picture only.
#
# The cuts know nothing of matrices. A rank owns a *range*, not a matrix. That makes all shares equal, however
# unequal the matrices are.
#
# Nobody ever keeps the whole second ruler. It is an address book, a **virtual buffer**: it says where each
# number would be if somebody did.
#
# ## Predict
#
# Which matrices are shared by several ranks, with the numbers `dp` and `bucket` as above?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
shared = ...  # a list of names, such as ["A", "D"]

# %%
split.check(shared)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Follow the dashed lines up. Or let the plan tell, for the keepers of each matrix:
#
# ```python
# shared = lesson.split_matrices(plan)
# ```
#
# </details>

# %% [markdown]
# ## The master plan
#
# The package writes this down, a line for each matrix; in code, the lines are `dist_meta`. Every rank reads the same plan, and finds its own part without asking anyone. A range `a to b`
# starts with number a and ends just before b, as in Python.

# %%
for rank in range(0, dp * tp, tp):
    print(f"rank {rank}:", lesson.say_plan(plan, rank), sep="\n", end="\n\n")

# %% [markdown]
# The third column is the same for all. The last one is not: it says where the matrix lies *in the rank's own
# slice*. And it can be calculated from the third.
#
# ## Find your range
#
# Write that calculation. You get `global_range`, where a matrix lies in its bucket; `place`, which slice
# (0 is the first); and `length`, how long each slice is. Return where the matrix lies in the slice, counted
# from the start *of the slice*; `(0, 0)` if it does not.
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def local_range(global_range, place, length):
    start, stop = global_range
    return ...

# %%
ranges.check(local_range)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# What two ranges share lies between the larger start and the smaller stop.
#
# ```python
# def local_range(global_range, place, length):
#     start, stop = global_range
#     begin = place * length
#     first = max(start, begin) - begin
#     last = min(stop, begin + length) - begin
#     return (first, last) if first < last else (0, 0)
# ```
#
# </details>

# %% [markdown]
# ## Collect a matrix on real processes
#
# Which ranks keep a part of C, and how much? Your function knows. On each rank, the next cell cuts its part of
# C out of the slice that the rank keeps. Then `all_gather_object` sends all parts to all ranks.

# %%
local_range = ranges.accepted_or(lesson.local_range)
meta = plan.dist_meta(plan.grid.at(0))[2]  # the line of C

def collect(place):
    kept = lesson.my_slice(plan, meta.bucket_idx, place, seed)
    start, stop = local_range(meta.global_range, place, len(kept))
    parts = [None] * dp
    dist.all_gather_object(parts, kept[start:stop])
    return parts

# %%
collected = launch(collect, dp, backend=backend)
print(f"parts of {meta.name}:", [len(part) for part in collected[0]])
print("the whole of it:", torch.equal(torch.cat(collected[0]), lesson.whole_matrix(plan, meta, seed)))

# %% [markdown]
# This is why lesson 09 has a *dp gather*: Newton–Schulz needs a matrix whole, and ranges cut matrices.
#
# ## How large should a bucket be?
#
# Try the buttons above the rulers once more. Small buckets: more padding, and more calls. Large ones: nothing
# can be worked on until a lot has arrived.
#
# Now measure it, with the package's own Muon, on matrices of about the shapes that a small GPT has. (They are
# made odd, so that there is padding.) Each bucket takes three collectives: one sums the gradients, one brings
# the matrices together for Newton–Schulz, one hands out the new weights. The columns are those of rank 0: the
# last but one is how many numbers of momentum it keeps. The time is that of the slowest rank.

# %% tags=["volatile"]
costs = launch(lesson.measure_buckets, dp * tp, args=(dp, tp, seed, steps), backend=backend)
print(lesson.say_buckets(costs))

# %% [markdown]
# What a rank keeps hardly depends on the bucket. The number of collectives does. Each costs time for its
# start, however small it is: the latency of lesson 03. And where ranks share cores, it costs far more than
# that, for it ends only when every rank has had its turn on a core.
#
# ## Recap
#
# - Momentum is cut by *number*, not by matrix: equal shares for all ranks, in every bucket.
# - Where a rank's part of a matrix lies is an intersection of two ranges. No message is needed to know it.
# - The virtual buffer is an address book. Nobody holds it.
# - Fewer, larger buckets mean fewer collectives and less padding.
#
# **Quiz.** Answer with numbers, for `dp` and `bucket` as above.
#
# 1. `kept`: how many numbers of momentum does rank 0 keep, padding not counted?
# 2. `padding`: how many numbers of padding are in all buckets together?
# 3. `buckets`: how many buckets are there if each takes at most 100 numbers?

# %% tags=["stub"]
answers = {"kept": ..., "padding": ..., "buckets": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# mine = [meta.local_range for meta in plan.dist_meta(plan.grid.at(0))]
# kept = sum(stop - start for start, stop in mine)
# buckets = len(lesson.plan_of(dp, tp, 100).buckets)
# answers = {"kept": kept, "padding": lesson.padding_of(plan), "buckets": buckets}
# ```
#
# </details>
