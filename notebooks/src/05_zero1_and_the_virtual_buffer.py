# %% [markdown]
# # 05 · ZeRO-1 and the virtual buffer
#
# Muon's momentum for Llama 3.1 70B takes 274 GB, more than three GPUs have, and so far every rank keeps all of it.
# How can each keep only a share, and still know where every entry is, without asking?

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
from muon_tutorial.learn import zero1_buffer as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Fifty-five minutes.** At the end you can say, for any entry of any matrix, which rank keeps its momentum and where in
# its memory. You can also say which matrices straddle a boundary, which ranks need them, and what that costs, all
# found with functions of your own, on real processes.
#
# *You need* lesson 00 (ranks) and lesson 03 (what a collective moves). No knowledge of ZeRO.
#
# *The 274 GB* are the 68.5 billion entries of Llama's matrices, 4 bytes each.
#
# - *Previous:* [04 · How did the first distributed Muon work?](04_the_first_distributed_muon.ipynb)
# - *Next:* [06 · Which ranks belong together?](06_the_grid.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 05` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* any dp and bucket. With tp above 1, the rulers show what the ranks at the first place along tp hold.
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
split, finding, ranges, sent, quiz = lesson.all_exercises(dp, tp, bucket)
_ = my_muon.so_far("05")

# %% [markdown]
# ## Three rulers
#
# With **ZeRO-1**, each entry of the momentum is kept on one rank only, while all dp ranks still have copies of the
# weights. The picture at the top shows the same entries three times:
#
# 1. *Matrices*, A to G, each written out row after row.
# 2. *Buckets*. A **bucket** is what travels together. Matrices fill it up to `bucket` entries (set above); a matrix
#    larger than that gets its own. **Padding**, entries that mean nothing, fills each bucket to a multiple of dp.
# 3. *Slices*. Each bucket is cut into dp equal parts. Rank 0 keeps the first *of every bucket*, rank 1 the second,
#    and so on.
#
# So a rank owns a *range*, not a matrix: a bucket's momentum of B entries is `m[B_dp]`. If the boundary of two slices
# falls inside a matrix, the matrix **straddles** it. The sizes in each bucket are:

# %%
sizes = {meta.name: math.prod(meta.shape) for meta in plan.dist_meta(plan.grid.at(0))}
for each in plan.buckets:
    named = {entry.matrix.name: sizes[entry.matrix.name] for entry in each.entries}
    total = sum(named.values())
    length = math.ceil(total / dp)  # of a slice
    print(f"{named}: {total} entries, {dp * length - total} of padding, a slice is {length}")

# %% [markdown]
# One more rank joins. Which matrices then straddle a boundary, and how many entries of padding are there in all?
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
# The boundaries are the multiples of the slice length, so look which matrices have one in their middle. Or let the
# plan tell:
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
# No rank keeps a bucket whole. So the buckets together are a **virtual buffer**: no memory, only addresses, which say
# where each entry would lie if some rank kept them all.
#
# ## Where is this entry?
#
# Follow one entry:

# %%
lesson.explore_entry(plan, live=widgets)

# %% [markdown]
# C is cut inside a row, because dp cuts the flat buffer, which knows nothing of rows. In code, the address book is
# the master plan, `dist_meta`, with one item for each matrix. Use it to find an entry.
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def address(meta, row, column, length):
    # meta.shape: of the matrix; meta.global_range: its (start, stop) in the bucket; length: of each slice
    return ...  # number of the slice, offset in it

# %%
finding.check(address)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Three things come before the entry: the matrices that are earlier in the bucket, whole rows, and a part of its own
# row. If you forget the first, only the first matrix of a bucket comes out right.
#
# ```python
# def address(meta, row, column, length):
#     in_bucket = meta.global_range[0] + row * meta.shape[1] + column
#     return divmod(in_bucket, length)
# ```
#
# </details>

# %%
meta = plan.dist_meta(plan.grid.at(0))[2]  # the item of C
place, offset = finding.accepted_or(lesson.address)(meta, 1, 5, lesson.slice_length(plan, meta.bucket_idx))
print(f"C[1, 5] is in slice {place}, at offset {offset}")

# %% [markdown]
# ## Find your range
#
# An item's `global_range` gives a matrix's entries in the bucket, and its `local_range` those in this rank's slice,
# counted from the *slice's* start. Compute the second from the first.
#
# <details><summary>Hint</summary>
#
# The slice is a range of the bucket, too. From where to where does it go? What two ranges have in common begins at
# the larger of the two starts.
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def local_range(global_range, place, length):
    # the matrix's range in slice number `place`, counted from the slice's start; (0, 0) if the slice has nothing of it
    # local_range((0, 130), 2, 55) is (0, 20): the slice goes from 110 to 165
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

# %%
local_range = ranges.accepted_or(lesson.local_range)

# %% [markdown]
# ## Who needs whom?
#
# Each entry of the update depends on the whole matrix. So every rank that keeps a part gathers the whole,
# orthogonalizes it, and uses its own part. The work is repeated, but no update is sent.
#
# Jen Wei's script (2025), the blueprint of this course, gathers *every* bucket, padding included. A thriftier way
# sends only the parts of matrices that straddle, straight to the ranks that keep the rest. An entry travels as
# bfloat16, 2 bytes. With the `dp` ranks that we began with, how many bytes does rank 0 *send* in each way?
#
# <details><summary>Hint</summary>
#
# When whole buckets are gathered on a ring, a rank sends its own slice of each bucket, and then passes on those that
# come, dp − 1 slices in all. For the thrifty way, look in the picture which matrices rank 0 shares with others, and
# how many entries of each it keeps.
#
# </details>
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
# At the default parameters rank 0 keeps 92 + 55 entries, and on a ring it sends 3 times as many. Two of its matrices
# straddle. Its 92 entries of A go to one other rank, and its 55 of E go to two. Or ask the plan:
#
# ```python
# everything, straddling = lesson.sent_for_momentum(dp, tp, bucket).values()
# ```
#
# </details>

# %% [markdown]
# ## What travels
#
# A step makes three collectives for each bucket: for gradients, Newton–Schulz's inputs and weights. Momentum itself
# never travels.
#
# <details><summary>The three collectives, as layouts</summary>
#
# ```text
# gradients                 g[B]{U_dp} → g[B_dp]
# inputs of Newton–Schulz   x[B_dp]    → x[B]
# weights                   w[B_dp]    → w[B]
# ```
#
# </details>
#
# In each, a rank sends (dp − 1) / dp of a bucket on a ring. Gradients and weights take 4 bytes an entry here:

# %%
entries = sum(lesson.length_of(plan, each) for each in plan.buckets)
for what, size in {"gradients": 4, "inputs of Newton–Schulz": 2, "weights": 4}.items():
    print(f"{what}: {entries * size * (dp - 1) // dp:,} bytes")

# %% [markdown]
# ## How large should a bucket be?
#
# Your machine times the package's Muon on 24 matrices of 15 or 60 kB, 716 kB together, with buckets of at most 10,
# 40, 160 and 640 kB. (A larger matrix has a bucket for itself.) Each bucket is cut over all ranks. Two things follow
# from the limit alone:
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
matrices = ...  # with buckets of at most 10 kB, how many of the 24 does each rank orthogonalize?
collectives = ...  # with at most 640 kB, how many collectives does a step make?

# %% tags=["answer", "volatile"]
costs = launch(lesson.measure_buckets, dp * tp, args=(dp, tp, seed, steps), backend=backend)
predicted = {"matrices": matrices, "collectives": collectives}
compare(predicted, lesson.found_costs(costs), lesson.draw_buckets(costs))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With larger buckets the bytes hardly change, but the time falls, for two reasons, and the picture tells them apart.
#
# - Each collective has its latency. From 10 to 40 kB the busiest rank still has all 24 matrices, and only the
#   collectives get fewer, 48 in place of 72. In most runs on our machine that saved a quarter to a third of the time,
#   and in some, while it was busy, nothing.
# - A bucket of one matrix is cut over all ranks, so each orthogonalizes every matrix. At 160 kB a rank
#   orthogonalizes at most 12 of the 24, at 640 kB 9. That saved much more: at 640 kB the time was a
#   quarter or a fifth of what it was at 40.
#
# On links with more latency the first reason counts more. How many times *faster* a step becomes depends on your
# machine. In one huge bucket, though, no rank could begin until all of it had arrived.
#
# ```python
# matrices = 24
# collectives = 2 * 3  # two buckets
# ```
#
# </details>

# %% [markdown]
# ## One list in place of many buckets
#
# In a large model a single matrix fills a bucket, which all ranks share, so each would orthogonalize every matrix. By
# default, therefore, the package cuts *one* long list of all matrices into dp slices, `zero1(cut="list")`. In a list
# of A to G, which matrices have a part in the last slice?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
in_last_slice = ...  # a list of names; the section on rulers prints each matrix's entries, and padding comes last

# %% tags=["answer"]
listed, last = lesson.plan_of(dp, tp, 1, cut="list"), plan.grid.at(0).group("dp")[-1]
found = [name for name in lesson.SHAPES if last in lesson.kept_of(listed, name)]
compare({"in_last_slice": in_last_slice}, {"in_last_slice": found}, lesson.draw_cuts(dp, tp))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# At the default parameters 585 entries make slices of 147, and the last one begins at 3 · 147, inside E. Now a rank
# works on a few matrices only. This lesson cuts buckets because the ranges of small matrices are easier to see there.
#
# ```python
# in_last_slice = ["E", "F", "G"]
# ```
#
# </details>

# %% [markdown]
# <details><summary>Who else cuts a list, and what a bucket is there</summary>
#
# A list that is cut as a whole, as in [Moonshot's paper](https://arxiv.org/abs/2502.16982), gives equal slices, too,
# and each slice is one unbroken part of the list. A slice is too long for one message, so it travels in several
# pieces. With one list, such a piece is called a bucket.
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - ZeRO-1 cuts momentum by *entry* and not by matrix, so that every rank has an equal share of every bucket.
# - A rank's part is the intersection of two ranges. Finding it needs no message.
# - A matrix that straddles a boundary must be gathered; the blueprint gathers all. Momentum stays on its rank;
#   gradients, Newton–Schulz's inputs and weights travel.
# - Fewer and larger buckets mean fewer collectives, fewer matrices on a rank, less padding, and about the same bytes.
#
# </details>
#
# **Quiz.**
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
answers = {
    "kept": ...,  # how many entries of momentum does rank 0 keep, padding not counted?
    "padding": ...,  # how many entries of padding are in all buckets together, with the notebook's dp?
    "buckets": ...,  # how many buckets are there if each takes at most 100 entries?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A slice is a bucket divided by dp and rounded up, and what this adds is padding. It comes last, so rank 0 has none of
# it. With buckets of at most 100 entries, a matrix joins the one before it only if there is still room for both: at the
# default parameters only F and G fit together.
#
# ```python
# totals = [sum(sizes[entry.matrix.name] for entry in each.entries) for each in plan.buckets]
# kept = sum(math.ceil(total / dp) for total in totals)
# buckets, room = 0, 0
# for size in sizes.values():
#     if size > room:
#         buckets, room = buckets + 1, 100
#     room -= size
# answers = {"kept": kept, "padding": dp * kept - sum(totals), "buckets": buckets}
# ```
#
# </details>

# %% [markdown]
# ## Make a matrix whole, on real processes
#
# Let one more rank join along dp, which moves all boundaries:

# %%
joined = lesson.plan_of(dp + 1, tp, bucket)
meta = joined.dist_meta(joined.grid.at(0))[2]  # the item of C
length = lesson.slice_length(joined, meta.bucket_idx)
print(f"C lies at {meta.global_range} in its bucket, and a slice of the bucket has {length} entries")

# %% [markdown]
# With your function each rank cuts its part of C out of its slice, and all parts go to all ranks. How many entries
# does each rank bring?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
parts = ...  # a number for each of the dp + 1 ranks

# %%
def collect(place):
    kept = lesson.my_slice(joined, meta.bucket_idx, place, seed)
    start, stop = local_range(meta.global_range, place, length)
    parts = [None] * (dp + 1)
    dist.all_gather_object(parts, kept[start:stop])
    return parts

# %%
collected = launch(collect, dp + 1, backend=backend)
print("whole again:", torch.equal(torch.cat(collected[0]), lesson.whole_matrix(joined, meta, seed)))

# %% tags=["answer"]
compare({"parts": parts}, {"parts": [len(part) for part in collected[0]]})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A rank brings nothing if its slice ends before C begins.
#
# ```python
# ends = [local_range(meta.global_range, place, length) for place in range(dp + 1)]
# parts = [stop - start for start, stop in ends]
# ```
#
# </details>

# %% [markdown]
# Real jobs also cut weights along tp, which gives a rank two kinds of neighbours: the next lesson's subject.
#
# *Read on:* [ZeRO](https://arxiv.org/abs/1910.02054)
