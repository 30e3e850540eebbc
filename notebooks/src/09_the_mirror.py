# %% [markdown]
# # 09 · The mirror: how does every matrix find its way back?
#
# Ranks keep slices, and Newton–Schulz needs whole matrices, so a step joins the slices and cuts the matrices again.
# Which of its moves cannot be undone?

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
from muon_tutorial.learn import the_mirror as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Seventy-five minutes.** At the end you can name the seven phases of a distributed Muon step, say what each of them
# sends, and write them from a blank cell. What you wrote will have run on real processes, with the same bits as one
# process. A good place to stop is before *Write the whole step*. When you come back, run all cells above it again.
#
# *You need* lesson 05 (a rank owns a range) and lesson 07 (what tp and dp cut). The names
# reduce_scatter and all_gather are from lesson 03.
#
# - *Previous:* [08 · What happens if each shard is orthogonalized alone?](08_each_shard_alone.ipynb)
# - *Next:* [10 · The bill: what does a step cost?](10_the_bill.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 09` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* change dp as you like; tp can be 1, 2 or 4.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 1
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import inspect
import torch
from muon_tutorial import Owned, Shard, launch, zeropower_via_newtonschulz
from muon_tutorial.engine.hop_collectives import take
from muon_tutorial.engine.travel import travel
from muon_tutorial.learn import the_mirror as lesson, my_muon
from muon_tutorial.learn.the_mirror import replay
from muon_tutorial.learn.widgets.reveal import compare
_ = my_muon.so_far("09")

# %% [markdown]
# ## Read the film
#
# The film shows the seven **phases** of a real step. A part's colour and number name the rank that *brought* it, or
# added it up in phase 1.
#
# ## Predict
#
# Fold the film at the dashed line: phase 5 lies on 3, 6 on 2, and 7 on 1. Each restores the *layout* that its partner
# changed. But which of phases 1 to 3 changes the *numbers* for good? And which of all seven send nothing?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
lost = ...  # a phase of the way out: 1, 2 or 3
silent = ...  # a list of phases, such as [1, 2]

# %%
plan = lesson.plan_of(dp, tp)
mirror, shapes, back, stepped, quiz = lesson.all_exercises(plan, seed)
mirror.check(lost, silent)

# %% tags=["answer"]
compare({"lost": lost, "silent": silent}, lesson.found_mirror(plan))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Phase 1 adds gradients up, and a sum cannot be taken apart. As for the messages: a rank that lacks something has to
# ask for it, while a rank that has too much just drops it.
#
# ```python
# lost = 1
# silent = [4, 5, 6] + ([1, 2, 7] if dp == 1 else []) + ([3] if tp == 1 else [])
# ```
#
# </details>

# %% [markdown]
# In our notation:
#
# ```text
# 1 reduce_scatter    g[B]{U_dp} → g[B_dp]
# 2 dp gather         x[B_dp]    → x[B]
# 3 tp gather         X[I, J_tp] → X[I, J]
# 4 Newton–Schulz     X[I, J]    → Y[I, J]
# 5 tp slice          Y[I, J]    → Y[I, J_tp]
# 6 dp slice          y[B]       → y[B_dp]
# 7 all_gather        w[B_dp]    → w[B]
# ```
#
# Phase 7 undoes only the layout of phase 1, because it makes weights whole, not gradients.

# %%
here = lesson.record_here(dp, tp, seed)
replay.explore(here, live=widgets, moment=4)

# %% [markdown]
# The momentum never travels: each rank updates its range `m[B_dp]`, computes x, the input of Newton–Schulz, from it,
# and sends only x.
#
# ## The trip of one matrix
#
# The film's matrix, attention's o, shares a bucket with the MLP's up and down. tp cuts the rows of up, and the
# columns of o and down, and each rank packs its pieces in this order:

# %%
bucket = plan.buckets[0]
for entry in bucket.entries:
    print(entry.matrix.name, entry.matrix.shape)

# %% [markdown]
# Which range of rank 0's bucket is o's?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
range_of_o = ...  # a pair: o's first entry, and the first entry after it

# %% tags=["answer"]
meta = plan.dist_meta(plan.grid.at(0))[1]
compare({"range_of_o": range_of_o}, {"range_of_o": meta.global_range})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Along tp, each rank has an equal piece of both matrices.
#
# ```python
# up, o = 128 * 32 // tp, 32 * 32 // tp
# range_of_o = (up, up + o)
# ```
#
# </details>

# %% [markdown]
# Lesson 05's master plan has this range as `meta.global_range`, and the piece's rows and columns as `meta.shape`. Now
# o travels:

# %%
print(lesson.say_trip(plan, here, "o"))

# %% [markdown]
# Each arrow is a **hop**: it changes how *one* axis holds the tensor. A phase's hops, with the dtype that they send,
# are its **route**. Line 5 reverses the hop of line 3, and sends nothing, because each tp rank has o whole. If line 3
# gathered o to one owner, at place 0 of tp (`Shard(1) → Owned(0)`), which collective would line 5 need?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
from_owner = ...  # "nothing", "all_gather", "broadcast" (one rank's tensor to all) or "scatter" (to each a piece)

# %% tags=["answer"]
print(lesson.say_hops())
compare({"from_owner": from_owner}, {"from_owner": lesson.asks_for(Owned(0), Shard(1))})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Only the owner has the update, so it sends each rank its piece: a scatter, which undoes a gather. In the table above,
# a reduce sends the sum to one rank.
#
# ```python
# from_owner = "scatter"
# ```
#
# </details>

# %% [markdown]
# ## Out of the bucket
#
# Before phase 3, take a rank's piece of a matrix out of the flat bucket, and give it its rows and columns back.
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
def unpack(flat, meta):
    return ...  # flat: this rank's bucket after phase 2: whole along dp, still cut along tp

# %%
shapes.check(unpack)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `global_shape` is the whole matrix. Before the tp gather there is only this rank's piece.
#
# ```python
# def unpack(flat, meta):
#     start, stop = meta.global_range
#     return flat[start:stop].view(meta.shape)
# ```
#
# </details>

# %% [markdown]
# Jen Wei's script, our blueprint, forgot to give the piece its rows and columns back, so Newton–Schulz got a flat
# tensor:

# %%
print(lesson.error_of(zeropower_via_newtonschulz, torch.ones(8).view(-1)))

# %% [markdown]
# ## The way out, and the way back
#
# `travel`, below, carries a tensor along a route; `at` are this rank's coordinates. It and `take`, which moves one
# hop, are **generators**: if a hop sends, they yield a *request* named by `label`, and wait until real processes or,
# in the next section, you answer it. `y = yield from travel(…)` runs one to its end and takes what it returns.

# %%
print(inspect.getsource(travel))

# %% [markdown]
# Write the way back. Think of shoes and socks: what goes on last comes off first.
#
# <details><summary>Hint</summary>
#
# `travel` goes over `route.hops` from first to last. On the way back the last hop comes first, and each hop goes the
# other way, which is its `.inverse`.
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def way_back(x, route, at, label):
    return ...  # x is what travel has returned; return what it began with

# %%
back.check(way_back)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The package turns the route around and travels that: `travel(x, route.inverse, at, label)`.
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
# ## You are the network
#
# In a **stepping world** all ranks are generators in this notebook. Each stops at a request until you press its
# group's button. A real network answers in another order each time. If that changed even one bit, no run could be
# repeated. Try to change the hash of the final weights: let one group race ahead.

# %% tags=["volatile"]
lesson.be_the_network(dp, tp, seed, live=widgets)

# %% [markdown]
# <details><summary>Did you find one?</summary>
#
# The hash never changes, because a rank sees only its own groups' answers, in the order of its own requests.
#
# </details>
#
# <details><summary>Which matrices phase 3 asks for</summary>
#
# A rank asks for each matrix of which its slice has a part. Where tp pieces are unequal, shorter ones are padded. If
# all that a slice has of a matrix is padding, it still counts as having a part. Otherwise the ranks of a tp group
# would ask for different matrices. If a boundary cuts a matrix, the ranks on both sides orthogonalize it.
#
# </details>
#
# ## A trap: the lost line
#
# In the blueprint, a second loop lacked a line:

# %%
print(lesson.LOST_LINE)

# %% [markdown]
# The optimizer's first parameter group has up and o, the second down. How often does that loop update each matrix?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
updates = ...  # such as {"up": 1, "o": 1, "down": 1}

# %% tags=["answer"]
compare({"updates": updates}, {"updates": lesson.run_lost_line()})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `params` still holds the last group's parameters. So these are updated once for each group, with each group's
# learning rate, and all others stand still. There is no error, and the loss still falls a little.
#
# ```python
# updates = {"up": 0, "o": 0, "down": 2}
# ```
#
# </details>

# %% [markdown]
# ## Write the whole step
#
# All lessons led here. `job` does the arithmetic, and you write the communication.
#
# <details><summary>Hint</summary>
#
# Phases 1, 2, 3 and 7 are `yield from travel(…)`. Phases 5 and 6 are `yield from way_back(…)`, on the routes of 3 and
# 2. Which of them handle one matrix, and which the whole bucket? `torch.zeros_like(flat)` makes a buffer in which to
# collect updates.
#
# </details>
#
# *Hard · 30 minutes · required · par 12 lines*

# %%
way_back = back.accepted_or(lesson.way_back)
unpack = shapes.accepted_or(lesson.unpack)

# %% tags=["stub"]
def my_step(job, bucket, at):
    # routes: bucket.gradient (phase 1), bucket.compute (2), entry.route of each matrix (3), bucket.parameter (7)
    # unpack(flat, meta): this rank's piece of a matrix; meta.global_range: where it lies in the flat buffer
    # job.label(1) labels phase 1, and job.label(3, entry) a phase of one matrix. Use, in this order:
    # job.gradients(bucket): this rank's own gradients, flat
    # job.momentum(bucket, summed): updates this rank's momentum, and returns x, which phase 2 sends
    # job.matrices(bucket): the pairs (entry, meta) of the matrices that this rank works on
    # job.newton_schulz(entry, whole): phase 4
    # job.apply(bucket, kept): this rank's new weights, from what phase 6 left
    # job.write(bucket, fresh): puts all new weights into the model, so that nothing is left to return
    return ...

# %%
stepped.check(my_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `done` may begin with zeros, although this rank does not fill all of it: phase 6 keeps only this rank's slice, and
# the rank has worked on every matrix of which its slice has a part.
#
# ```python
# def my_step(job, bucket, at):
#     summed = yield from travel(job.gradients(bucket), bucket.gradient, at, job.label(1))
#     flat = yield from travel(job.momentum(bucket, summed), bucket.compute, at, job.label(2))
#     done = torch.zeros_like(flat)
#     for entry, meta in job.matrices(bucket):
#         whole = yield from travel(unpack(flat, meta), entry.route, at, job.label(3, entry))
#         update = job.newton_schulz(entry, whole)  # phase 4
#         piece = yield from way_back(update, entry.route, at, job.label(5, entry))
#         done[slice(*meta.global_range)] = piece.flatten()
#     kept = yield from way_back(done, bucket.compute, at, job.label(6))
#     fresh = yield from travel(job.apply(bucket, kept), bucket.parameter, at, job.label(7))
#     job.write(bucket, fresh)
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - The seven phases are reduce_scatter, dp gather, tp gather, Newton–Schulz, tp slice, dp slice, all_gather.
# - The way back is the way out in reverse: the last hop comes first, and each goes the other way. Only a sum has
#   no way back.
# - A gather has to send something, and a slice only drops what a rank does not need. Where a matrix is gathered to an
#   owner, the way back sends, too.
# - The order in which groups are answered changes nothing.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "requests": ...,  # how many requests does rank 0 make, tp gathers counted one by one?
    "whole": ...,  # on how many ranks is o whole at Newton–Schulz?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Phases 1, 2 and 7 ask once each, for the whole bucket, and phase 3 once for each matrix of which rank 0's slice has a
# part. At the default parameters these are up and o, so it makes 3 + 2 requests. The boundary of the slices falls
# inside o, so both places along dp need all of it, and at each place every tp rank gathers it: 2 · tp.
#
# ```python
# asked = len(here.diaries[0].sent)
# whole = len(here.workers("o"))
# answers = {"requests": asked, "whole": whole}
# ```
#
# </details>

# %% [markdown]
# ## On real processes, to the bit

# %%
my_step = stepped.accepted_or(lesson.reference_step)

def run_mine(rank):
    return lesson.job(rank, dp, tp, seed).run(my_step)

reports = launch(run_mine, dp * tp, backend=backend)
replay.explore(lesson.recording_of(reports, dp, tp), live=widgets)

# %% [markdown]
# To compare, `torch.optim.Muon` takes the same step in one process, with the averages of phase 1:

# %%
gradients, after = lesson.whole_gradients(plan, reports), lesson.whole_weights(plan, reports)
alone = lesson.step_alone(gradients, seed)
print("entries that differ:", lesson.different_bits(after, alone))

# %% [markdown]
# The bits agree because every matrix was whole when Newton–Schulz met it. Now `my_muon.py` takes two steps on each of
# three grids:

# %% tags=["ranks"]
print(my_muon.try_it())

# %% [markdown]
# The step that ran is right to the bit, and the next lesson asks what it costs.
#
# *Read on:* [Muon is Scalable, section 2.3](https://arxiv.org/abs/2502.16982)
