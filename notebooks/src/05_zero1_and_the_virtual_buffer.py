# %% [markdown]
# # 05 · ZeRO-1 and the virtual buffer
#
# Momentum is as large as the weights, and so far every rank keeps all of it. How can each keep only its share, and
# still know where every entry is, without asking anybody?

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
from muon_tutorial.learn import zero1_buffer as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty minutes.** At the end you can say, for any entry of any matrix, which rank keeps its momentum, and where
# in its memory; which matrices straddle a boundary, who needs them, and what that costs. You will have found it with
# functions of your own, on real processes.
#
# *You need* lesson 00 (ranks) and lesson 03 (what a collective moves). No knowledge of ZeRO.
#
# - *Previous:* [04 · How did the first distributed Muon work?](04_the_first_distributed_muon.ipynb)
# - *Next:* [06 · Which ranks belong together?](06_the_grid.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 05` makes. It has
#   nothing to install.
#
# *Other grids:* any dp and bucket. With tp above 1, the rulers show what the ranks at the first place along tp
# hold.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 4
tp: int = 1
bucket: int = 400
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import math
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.learn import zero1_buffer as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
plan = lesson.plan_of(dp, tp, bucket)
split, ranges, sent, planned, quiz = lesson.all_exercises(dp, tp, bucket)
_ = my_muon.so_far("05")

# %% [markdown]
# ## Three rulers
#
# **ZeRO-1** keeps every entry of the momentum on one rank only. (The 1: only the optimizer's memory is cut. The
# weights stay copies.) The picture above shows the same entries on three rulers:
#
# 1. *Matrices*, A to G, each written out flat, row after row.
# 2. *Buckets*, which travel as one. A **bucket** takes matrices until the next would exceed the limit (the parameter
#    `bucket`, in entries here). A matrix that alone is larger than the limit gets a bucket of its own. Then comes
#    **padding**, entries that mean nothing, until dp divides the length.
# 3. *Slices*. Each bucket is cut into dp equal parts. Rank 0 keeps the first part *of every bucket*, and so on.
#
# So a rank owns a *range*, not a matrix: a flat buffer of B entries goes from `m[B]` to `m[B_dp]`. All shares are equal,
# but a boundary may cut through a matrix, which then **straddles** it. In formulas, that is:

# %%
sizes = {meta.name: math.prod(meta.shape) for meta in plan.dist_meta(plan.grid.at(0))}
for each in plan.buckets:
    named = {entry.matrix.name: sizes[entry.matrix.name] for entry in each.entries}
    total = sum(named.values())
    length = math.ceil(total / dp)  # of a slice
    print(f"{named}: {total} entries, {dp * length - total} of padding, a slice is {length}")

# %% [markdown]
# Now one more rank joins: dp + 1. By hand: which matrices straddle a boundary then, and how many entries of padding
# are there in all?
#
# *Easy · 4 minutes · required*

# %% tags=["stub", "predict"]
straddle = ...  # a list of names, such as ["A", "D"]
padding = ...

# %%
split.check(straddle, padding)

# %% tags=["answer"]
joined = lesson.plan_of(dp + 1, tp, bucket)
found = {"straddle": lesson.split_matrices(joined), "padding": lesson.padding_of(joined)}
compare({"straddle": straddle, "padding": padding}, found, lesson.draw_rulers(joined))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Follow the boundaries: multiples of the slice length. Or let the plan tell:
#
# ```python
# joined = lesson.plan_of(dp + 1, tp, bucket)
# straddle = lesson.split_matrices(joined)
# padding = lesson.padding_of(joined)
# ```
#
# </details>

# %%
lesson.explore(plan, bucket, live=widgets)

# %% [markdown]
# Nobody ever holds the second ruler. It is an address book, a **virtual buffer**: it says where each entry would be
# if somebody did.
#
# ## Where is this entry?
#
# Pick a matrix, press play, and follow an entry down to the memory of the rank that keeps it.

# %%
lesson.explore_entry(plan, live=widgets)

# %% [markdown]
# C changes hands in the middle of a row. So the picture of lesson 00, where dp seemed to cut rows, was a special case:
# dp cuts the flat buffer, and it does not know where rows end. In code, with the package's master plan, `dist_meta`,
# which has an item for each matrix:

# %%
meta = plan.dist_meta(plan.grid.at(0))[2]  # the item of C
row, column = 1, 5
in_bucket = meta.global_range[0] + row * meta.shape[1] + column
place, offset = divmod(in_bucket, lesson.slice_length(plan, meta.bucket_idx))
print(f"C[{row}, {column}] is entry {in_bucket} of its bucket: slice {place}, offset {offset}")

# %% [markdown]
# ## Find your range
#
# `global_range` says which entries of its bucket a matrix takes; `local_range`, which entries of the slice hold this
# rank's part of it. Compute the second from the first. `place` says which slice (0 is the first), `length` how long
# slices are. Count from the start *of the slice*, and return `(0, 0)` where it has nothing of the matrix.
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
# ## Make a matrix whole, on real processes
#
# Newton–Schulz needs a whole matrix. With your function, each rank cuts its part of C out of its slice, and all parts
# go to all ranks.

# %%
local_range = ranges.accepted_or(lesson.local_range)

def collect(place):
    kept = lesson.my_slice(plan, meta.bucket_idx, place, seed)
    start, stop = local_range(meta.global_range, place, len(kept))
    parts = [None] * dp
    dist.all_gather_object(parts, kept[start:stop])
    return parts

# %%
collected = launch(collect, dp, backend=backend)
print(f"parts of {meta.name}:", [len(part) for part in collected[0]])
print("whole again:", torch.equal(torch.cat(collected[0]), lesson.whole_matrix(plan, meta, seed)))

# %% [markdown]
# ## Who needs whom?
#
# A rank that keeps only a part of a matrix needs the rest, because each entry of the update depends on all entries of
# the matrix. So every rank that keeps a part gathers the whole, orthogonalizes it, and uses its own part of the update.
# The work is repeated, but then every rank already has the update it needs, and nothing has to be sent back. A matrix
# that is whole in one slice need not travel.
#
# The first published version of this step gathers *every* bucket on every rank, padding and all. The thrifty way
# gathers only what straddles: each rank sends its part of such a matrix to the others that keep one. On the wire an
# entry is bfloat16, 2 bytes. Back to `dp` ranks: how many bytes does rank 0 *send*, either way?
#
# *Medium · 6 minutes · required*

# %% tags=["stub", "predict"]
everything = ...  # bytes
straddling = ...

# %%
sent.check(everything, straddling)

# %% tags=["answer"]
counted = lesson.sent_for_momentum(dp, tp, bucket)
compare({"everything": everything, "straddling": straddling}, counted, lesson.draw_straddling(plan))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# At the default parameters rank 0 keeps 92 + 55 entries, and on a ring it sends 3 · 147. Two of its matrices straddle:
# its 92 entries of A go to one other rank, its 55 of E to two. Or ask the plan:
#
# ```python
# everything, straddling = lesson.sent_for_momentum(dp, tp, bucket).values()
# ```
#
# </details>

# %% [markdown]
# ## Cut or gathered?
#
# One step of one rank, with whole buckets gathered. Filled: what it holds at that moment. The momentum stays
# where it is for the whole training.

# %%
lesson.draw_step(plan, rank=tp % (dp * tp))

# %% [markdown]
# In a ring of dp ranks, each sends (dp − 1) / dp of a bucket. Gradients and weights take 4 bytes an entry here:

# %%
entries = sum(lesson.length_of(plan, each) for each in plan.buckets)
for what, size in {"gradients": 4, "inputs of Newton–Schulz": 2, "weights": 4}.items():
    print(f"{what}: {entries * size * (dp - 1) // dp:,} bytes")

# %% [markdown]
# ## How large should a bucket be?
#
# Measured with the package's own Muon, on matrices like those of a small GPT:

# %% tags=["volatile"]
costs = launch(lesson.measure_buckets, dp * tp, args=(dp, tp, seed, steps), backend=backend)
lesson.draw_buckets(costs)

# %% [markdown]
# The bytes hardly change. The number of collectives does, three a bucket, and each costs its latency. Then why
# not one huge bucket? Nothing can be worked on until all of it has arrived.
#
# In a large model one matrix alone fills a bucket. If dp still cut every bucket, each rank would hold a part of every
# matrix and would have to orthogonalize all of them. So for a large model the package cuts *one* long list of all
# matrices (`zero1(cut="list")`, the default), as the paper does, and sends it in several buckets. Then a matrix lies on
# one rank, or on two. This lesson uses `cut="bucket"`, because small matrices show the ranges better.
#
# ## The plan of all ranks
#
# Now the whole master plan. From the matrices' sizes, dp and the limit `most`, return a list for each rank, with
# `(bucket, global_range, local_range)` for each matrix, even where the rank keeps nothing of it. No message, no tp.
#
# *Hard · 15 minutes · optional · par 15 lines*

# %% tags=["stub", "hard"]
def all_ranges(sizes, dp, most):
    buckets = [[]]  # numbers of matrices
    ranges = [[] for place in range(dp)]
    return ...

# %%
planned.check(all_ranges)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def all_ranges(sizes, dp, most):
#     buckets = [[]]
#     for index, size in enumerate(sizes):
#         if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + size > most:
#             buckets.append([])
#         buckets[-1].append(index)
#     ranges = [[] for place in range(dp)]
#     for number, bucket in enumerate(buckets):
#         length, start = math.ceil(sum(sizes[i] for i in bucket) / dp), 0
#         for i in bucket:
#             lies = (start, start + sizes[i])
#             for place in range(dp):
#                 ranges[place].append((number, lies, local_range(lies, place, length)))
#             start += sizes[i]
#     return ranges
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# - ZeRO-1 cuts momentum by *entry*, not by matrix: equal shares for all ranks, in every bucket.
# - A rank's part is the intersection of two ranges, and finding it needs no message.
# - Matrices that straddle a boundary have to be gathered. Momentum stays; gradients and weights travel.
# - Fewer, larger buckets mean fewer collectives and less padding, and about the same bytes.
#
# **Quiz.** One line measures each.
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
answers = {
    "kept": ...,  # how many entries of momentum does rank 0 keep, padding not counted?
    "padding": ...,  # how many entries of padding are in all buckets together?
    "buckets": ...,  # how many buckets are there if each takes at most 100 entries?
}

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

# %% [markdown]
# So far all ranks stood in one row. Real jobs cut the matrices, too, and for that ranks stand in a grid, which the next
# lesson builds.
