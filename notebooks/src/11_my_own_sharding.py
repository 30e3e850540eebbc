# %% [markdown]
# # 11 · How do I plug in my own sharding?
#
# Your model is cut in a way that no library has foreseen. Which functions do you write, so that Muon still
# orthogonalizes whole matrices, and each of them only once?

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
from muon_tutorial.learn import own_sharding as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: forty-five minutes, what you need, where to go from here</summary>
#
# **Forty-five minutes.** At the end you can plug any sharding into Muon with three functions of your own, deal
# out the work, and keep bytes away from slow links. Your code moves the bytes, on real processes.
#
# *You need* lesson 03 (collectives), lesson 04 (owners, makespan) and lesson 06 (groups).
#
# - *Previous:* [09 · The whole step, and its opposite arrows](09_the_whole_step.ipynb)
# - *Next:* [12 · It hangs, or lies. Which rank, which line?](12_it_hangs_or_lies.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 11` makes. It has
#   nothing to install.
#
# *Other grids:* any dp and tp of two or more in all; the more ranks, the emptier the shards.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 3
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import inspect, math
import torch
import torch.distributed as dist
from muon_tutorial import DistributedConfig, create_dtensor_config
from muon_tutorial.learn import own_sharding as lesson
from muon_tutorial.learn.widgets.reveal import compare
guess, assigned, gathered, given_back, apart = lesson.all_exercises(dp, tp, seed, backend)

# %% [markdown]
# ## Three functions
#
# Read the picture from the top. Four colours flow into one matrix; then one colour flows back. The layouts differ in
# who brings what, and Muon need not know. It hands each parameter to three functions of a `DistributedConfig`:

# %%
print(inspect.getsource(lesson.muon_step))

# %% [markdown]
# `assign_fn` was asked once, beforehand: it returned `owners`. The other two are collectives. **Only the owner gets the
# matrix, yet everybody calls.** On other ranks `gather_fn` returns None, and `redistribute_fn` is handed None. (The
# package's own loop does the same with momentum, weight decay and several parameters in flight.)
#
# A first test. One matrix is cut over all ranks as **FSDP2** cuts, PyTorch's `fully_shard`: by rows, with `torch.chunk`.
# Its owner is the *last* rank. How many rows does each rank hold? And what does `gather_fn` return on each?

# %%
print(f"rows of the matrix: {lesson.bad_rows(dp * tp)}, ranks: {dp * tp}, owner: rank {dp * tp - 1}")

# %% [markdown]
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
rows = ...  # of each rank, such as [5, 2, 1, 1]
got = ...  # on each rank, "tensor" or None, such as ["tensor", "tensor", None, None]

# %%
guess.check(rows, got)

# %% tags=["answer", "ranks"]
found = lesson.run_owner_of_nothing(dp, tp, seed, backend)
compare({"rows": rows, "got": got}, {"rows": found.rows, "got": found.got})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# rows = lesson.rows_of(lesson.bad_rows(dp * tp), dp * tp)
# got = [None] * (dp * tp - 1) + ["tensor"]
# ```
#
# </details>

# %% [markdown]
# An **empty shard** is nothing special: its rank brings zero rows, and calls like the others. (`lesson.rows_of(rows, ranks)`
# knows the rule.) Now play all four layouts. **HSDP** is FSDP2 within each *replica*, a set of ranks that holds the whole
# model; **expert parallel** (EP) gives each rank experts of its own. Where do arrows cross from one replica to another?

# %%
lesson.explore_layouts(dp, tp, live=widgets)

# %% [markdown]
# ## Yours, on real ranks
#
# Write the three for `Shard(0)`. The ranks along dp share matrices, and each place along tp has a group, and matrices,
# of its own, as with experts. `state` holds what you put there: here `"group"`, your process group, and `"shapes"`, the
# full shape of each parameter. `params` are the shards of *this* rank, plain tensors.
#
# First `assign`. All ranks of a group must return the same dict, and owners are **global ranks**: numbers among
# all ranks, not places in the group.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def assign(params, state):
    return ...  # {index: rank} for every parameter

# %%
assigned.check(assign)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def assign(params, state):
#     ranks = dist.get_process_group_ranks(state["group"])
#     return {index: ranks[index % len(ranks)] for index in range(len(params))}
# ```
#
# </details>

# %% [markdown]
# Now `gather`. `state` has grown: `"param_idx"` says which parameter it is, `"local_shape"` what this rank holds of it.
# The shards are uneven, and one matrix has a single row. `dist.gather` wants pieces of one size, but
# `dist.all_to_all_single` takes split sizes, zero among them. You need them again on the way back, so `splits` makes them.
#
# *Medium · 12 minutes · required*

# %% tags=["stub"]
def splits(owner, state):
    return ...  # two lists: elements I send to each rank of my group, elements I take from each

def gather(momentum_buffer, dst_rank, state):
    return ...  # the whole matrix on dst_rank, None elsewhere

# %%
gathered.check(gather)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def splits(owner, state):
#     ranks = dist.get_process_group_ranks(state["group"])
#     total, columns = state["shapes"][state["param_idx"]]
#     send = [math.prod(state["local_shape"]) * (rank == owner) for rank in ranks]
#     take = [n * columns * (dist.get_rank() == owner) for n in lesson.rows_of(total, len(ranks))]
#     return send, take
#
# def gather(momentum_buffer, dst_rank, state):
#     send, take = splits(dst_rank, state)
#     whole = momentum_buffer.new_empty(sum(take))
#     dist.all_to_all_single(whole, momentum_buffer.flatten(), take, send, group=state["group"])
#     shape = state["shapes"][state["param_idx"]]
#     return whole.view(shape) if dist.get_rank() == dst_rank else None
# ```
#
# </details>

# %% [markdown]
# And back. The check then hands all three to `Muon` for a few steps, and compares every rank with a single process, bit by
# bit. Updates come in bfloat16.
#
# *Medium · 6 minutes · required · par 224 bytes on the way back*

# %% tags=["stub"]
def redistribute(update, src_rank, state):
    return ...  # this rank's rows of the update; update is None off src_rank

# %%
given_back.check(redistribute)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The opposite arrow: the same call, with the two lists exchanged.
#
# ```python
# def redistribute(update, src_rank, state):
#     take, send = splits(src_rank, state)
#     mine = torch.empty(sum(take), dtype=torch.bfloat16)
#     flat = mine.new_empty(0) if update is None else update.flatten()
#     dist.all_to_all_single(mine, flat, take, send, group=state["group"])
#     return mine.view(state["local_shape"])
# ```
#
# </details>

# %% [markdown]
# ## Five traps
#
# Each was run just now, on real ranks. First, a place in a group is not a rank. On one group out of two this goes
# well, and so would your test on a single group:

# %% tags=["ranks"]
traps = lesson.run_traps(dp, tp, seed, backend)
print(lesson.say_trap(traps, "global rank"))

# %% [markdown]
# Second, uneven shards through `dist.gather`. Look who complains, and who waits:

# %% tags=["volatile"]
print(lesson.say_trap(traps, "uneven"))

# %% [markdown]
# Third, `Partial`: each rank holds a sum over its own data, in full size. Nothing is cut, so nothing seems to be
# missing. But Newton–Schulz of a part is no part of the answer:

# %%
print(lesson.say_trap(traps, "partial"))

# %% [markdown]
# Fourth, gather what you are handed. It is the momentum (with Nesterov in it), a shard of which stays on each rank. With
# the gradient instead, the first step is near enough to fool a test:

# %%
print(lesson.say_trap(traps, "gradient"))

# %% [markdown]
# Fifth, a weight may hold several matrices: query, key and value in one, or a stack of experts. They want to be
# orthogonalized apart. A helper's config does it for you, by `parts`:

# %%
print(lesson.say_trap(traps, "several in one"))

# %% [markdown]
# ## Deal out the work
#
# An owner works, so `assign_fn` decides how long all others wait. Here is a model with experts. A dense matrix may be owned
# by anybody, an expert by the ranks of its group alone.

# %%
model = lesson.mixed_model(dp, tp)
print(lesson.say_model(model))

# %% [markdown]
# Spread the work. `state["shapes"]` are full shapes, `state["holders"]` the ranks that may own each parameter, and
# `lesson.cost_of(shape)` is the work in GFLOP. What counts is the makespan, the work of the busiest rank. Par is the
# package's own choice, which deals out one set of holders after the other. It can be beaten!
#
# *Medium · 8 minutes · required · par 39 GFLOP on the busiest rank*

# %% tags=["stub"]
def assign_by_work(params, state):
    return ...

# %%
shared = lesson.check_shared_work(model)
shared.check(assign_by_work)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def assign_by_work(params, state):
#     busy, owners = {}, {}
#     cost = [lesson.cost_of(shape) for shape in state["shapes"]]
#     for index in sorted(range(len(params)), key=lambda index: -cost[index]):
#         owner = min(state["holders"][index], key=lambda rank: busy.get(rank, 0))
#         busy[owner] = busy.get(owner, 0) + cost[index]
#         owners[index] = owner
#     return owners
# ```
#
# </details>

# %%
lesson.draw_loads(model, shared.accepted_or(lesson.longest_first_joint)(model.params_at(0), model.state))

# %% [markdown]
# ## HSDP, and not a byte across
#
# In the film one owner served both replicas, so the update crossed. Where replicas stand in different racks, you
# may rather compute twice. Write a config in which each replica has owners of its own, for **DTensor** parameters, tensors
# of which a rank holds a part and which know the whole. `mesh` has the axes `"replicate"` and `"shard"`. A momentum
# brings `.to_local()`, and `state["full_shape"]` is filled.
#
# *Hard · 12 minutes · optional · par 0 bytes between replicas*

# %% tags=["stub", "hard"]
def hsdp_config(mesh):
    return ...  # a DistributedConfig

# %%
apart.check(hsdp_config)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def hsdp_config(mesh):
#     group = mesh.get_group("shard")
#     def known(state):
#         return {**state, "shapes": {state["param_idx"]: state["full_shape"]}}
#     def gather_fn(momentum, owner, state):
#         return gather(momentum.to_local(), owner, known(state))
#     def redistribute_fn(update, owner, state):
#         return redistribute(update, owner, known(state))
#     state = {"group": group, "agree_group": group}
#     return DistributedConfig(assign, gather_fn, redistribute_fn, state)
# ```
#
# </details>

# %% tags=["ranks"]
mine = lesson.run_replicas(dp, tp, seed, apart.accepted_or(lesson.hsdp_config), backend)
helper = lesson.run_replicas(dp, tp, seed, lambda mesh: create_dtensor_config(), backend)
print(lesson.say_replicas(mine, helper))

# %% [markdown]
# Neither is better. The helper computes each matrix once; yours stays off the slow links. (`create_dtensor_config()`,
# `create_devicemesh_config` and `create_processgroup_config` write all three functions for common layouts.)
#
# ## Who waits for whom?
#
# Look at `muon_step` once more: nobody reaches the second parameter before the first has come back. So the
# package keeps several in flight, as many as owners if `async_gpu_parallelism` is on, and `prefetch_count` more.
# Your functions then return a handle with `wait()`, in place of a tensor. Here is one step, three times:

# %% tags=["ranks", "volatile"]
windows = lesson.run_windows(dp, tp, seed, backend)
lesson.draw_windows(windows)

# %% [markdown]
# First a staircase: one owner computes, and all others wait. Then owners work side by side, as far as this machine
# has cores. With two gathered ahead, matrices are under way before they are needed, and lie in memory for it. The bits
# do not care:

# %% tags=["volatile"]
print(lesson.say_windows(windows))

# %% [markdown]
# ## Recap
#
# - `assign_fn`, `gather_fn`, `redistribute_fn`: nothing else in Muon knows how you cut.
# - Only the owner gets the matrix, yet everybody calls, with full hands or empty ones.
# - Owners are global ranks, and all ranks that share a parameter name the same one.
# - Gather what you are handed. Take shapes and work from the whole matrix.
# - A window changes when things happen, and no bit.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above.
#
# 1. `fewest`: how many rows did the poorest rank of the first matrix hold?
# 2. `at_once`: on how many ranks did Newton–Schulz run at once, without `async_gpu_parallelism`?
# 3. `step`: in which step did the gathered gradient first go badly wrong?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {"fewest": ..., "at_once": ..., "step": ...}

# %%
lesson.quiz(found.rows, windows).check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answers = {"fewest": min(found.rows), "at_once": windows[0].at_once, "step": 2}
# ```
#
# </details>
