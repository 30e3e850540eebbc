# %% [markdown]
# # 11 · How do I plug in my own sharding?
#
# Your model is cut in a way no library has foreseen. Which functions do you write, so that Muon still orthogonalizes
# each matrix whole, and only once?

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
from muon_tutorial.learn import own_sharding as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Eighty minutes.** At the end you can plug any sharding into Muon with three functions of your own, and deal out the
# work so that no owner holds up the rest. Your code will have moved the bytes, on real processes. A good place to stop
# is before *Deal out the work*. When you come back, run all cells above it again.
#
# *You need* lesson 03 (collectives), lesson 04 (owners, makespan), lesson 06 (groups) and lesson 07 (layouts).
#
# - *Previous:* [10 · The bill: what does a step cost?](10_the_bill.ipynb)
# - *Next:* [12 · Why does `step()` return before the work is done?](12_why_step_returns_early.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 11` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* any with several ranks; the more ranks, the emptier the shards.
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
import math
import torch
import torch.distributed as dist
from muon_tutorial import launch, zeropower_via_newtonschulz
from muon_tutorial.learn import own_sharding as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
guess, assigned, gathered, given_back = lesson.all_exercises(dp, tp, seed, backend)
local_shape = my_muon.so_far("11").local_shape

# %% [markdown]
# ## Three functions
#
# Each row of the picture is a function that you write, and Muon's loop (here without size factor and weight decay) gets all
# three in a `DistributedConfig`:

# %%
def muon_step(params, momenta, owners, config, lr):
    for index, param in enumerate(params):
        state = {**config.state, "param_idx": index, "local_shape": tuple(param.shape)}
        full = config.gather_fn(momenta[index], owners[index], state)
        update = None
        if dist.get_rank() == owners[index]:
            update = zeropower_via_newtonschulz(full)
        param -= lr * config.redistribute_fn(update, owners[index], state)

# %% [markdown]
# Before the loop, `assign_fn` has named the `owners`. `gather_fn` collects the rows of Newton–Schulz's input,
# `X[I_dp, J]`. Only the owner, the rank at place k of dp, gets the whole matrix: `X[I, J]@dp=k`. `redistribute_fn`
# sends each rank its part of the update. All ranks must call both.
#
# ZeRO-1 keeps weights whole along dp, but **ZeRO-3** cuts them. PyTorch's ZeRO-3 is **FSDP2** (`fully_shard`): it
# cuts rows, as `torch.chunk` does. Here *all* dp × tp ranks hold rows of one matrix, and the last rank owns it:

# %%
print(f"{lesson.bad_rows(dp * tp)} rows, {dp * tp} ranks, owner: rank {dp * tp - 1}")

# %% [markdown]
# How many rows does each rank hold, and what does `gather_fn` return on each?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
rows = ...  # of each rank, such as [5, 2, 1, 1]
got = ...  # on each rank "tensor" or None, such as ["tensor", "tensor", None, None]

# %%
guess.check(rows, got)

# %% tags=["answer", "ranks"]
compare({"rows": rows, "got": got}, lesson.run_owner_of_nothing(dp, tp, seed, backend))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `torch.chunk` rounds rows / ranks up, so each rank takes `step` rows until none are left, and the last may get none.
# It is the owner all the same, and only the owner gets the matrix.
#
# ```python
# ranks, count = dp * tp, lesson.bad_rows(dp * tp)
# step = math.ceil(count / ranks)
# rows = [max(0, min(step, count - step * rank)) for rank in range(ranks)]
# got = [None] * (ranks - 1) + ["tensor"]
# ```
#
# </details>

# %% [markdown]
# So even a rank with an **empty shard**, one without rows, must call `gather_fn`: here it is the owner.
#
# **HSDP** is FSDP2 within each *replica*, a set of ranks that together hold the whole model. As the top picture shows,
# a matrix is gathered within one replica, but its owner sends the update to the ranks of all replicas. (The last
# layout there is **expert parallel**, or EP: each rank has its own *experts*, small MLPs that each get some of the
# tokens. All other matrices are *dense*.)
#
# ## Yours, on real ranks
#
# Here each dp group (a column of the grid) has its own matrices, and its ranks divide the rows of each among them. A
# rank may get none. Name each owner by its global rank, not its place in the group (the k of `@dp=k`). If there are
# enough matrices, every rank of the group must own one.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def assign(params, state):
    # params: this rank's shards; state["group"]: your process group; state["shapes"]: a list of all full shapes
    return ...  # {index: rank} for every parameter, the same dict on all ranks of a group

# %%
assigned.check(assign)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `index % len(ranks)` is a place in the group, and `ranks[…]` turns it into a global rank.
#
# ```python
# def assign(params, state):
#     ranks = dist.get_process_group_ranks(state["group"])
#     return {index: ranks[index % len(ranks)] for index in range(len(params))}
# ```
#
# </details>

# %% [markdown]
# `dist.gather` wants equal pieces, but `dist.all_to_all_single` takes split sizes, one for each rank:

# %% tags=["ranks"]
def to_rank_0(rank):
    ranks = dist.get_world_size()
    send = [rank] + [0] * (ranks - 1)  # elements for each rank
    take = list(range(ranks)) if rank == 0 else [0] * ranks  # elements from each
    came = torch.empty(sum(take))
    dist.all_to_all_single(came, torch.full((rank,), float(rank)), take, send)
    return came.tolist()

print(launch(to_rank_0, dp * tp, backend=backend))

# %% [markdown]
# Write `splits`, and `gather`, which uses its two lists. dp cuts the rows as tp cuts those of a column-parallel
# weight (lesson 07), so your function from there tells every rank's shape: `local_shape(shape, "column", place,
# ranks)`.
#
# <details><summary>Hint</summary>
#
# Only the owner takes anything, and each rank sends to the owner alone. So in the first list of `splits`, only the
# entry at the owner's place may differ from 0, and the second list is all zeros except on the owner.
#
# </details>
#
# *Medium · 18 minutes · required*

# %% tags=["stub"]
def splits(owner, state):
    # Muon has added state["param_idx"] and this rank's state["local_shape"]
    # two lists with an entry for each rank of the group: how many elements I send it, and how many I take from it
    return ...

def gather(momentum_buffer, dst_rank, state):
    return ...  # the whole matrix if this rank is dst_rank, in the dtype of momentum_buffer; None on other ranks

# %%
gathered.check(gather)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# All ranks call, even a rank that neither sends nor takes anything: its splits are all zeros. The owner also sends
# its own rows to itself, so that it finds all of them in `whole`, in order.
#
# ```python
# def splits(owner, state):
#     ranks = dist.get_process_group_ranks(state["group"])
#     total, columns = state["shapes"][state["param_idx"]]
#     send = [math.prod(state["local_shape"]) * (rank == owner) for rank in ranks]
#     rows = [local_shape((total, columns), "column", place, len(ranks))[0] for place in range(len(ranks))]
#     take = [n * columns * (dist.get_rank() == owner) for n in rows]
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
# Write the way back. An update is bfloat16.
#
# <details><summary>Hint</summary>
#
# On the way back, each rank takes what it sent on the way out. So call the same `splits` and exchange the two lists.
# A rank without the update brings an empty tensor.
#
# </details>
#
# *Medium · 10 minutes · required · par 56 bytes sent on the way back, for all matrices, as a mean over ranks*

# %% tags=["stub"]
def redistribute(update, src_rank, state):
    return ...  # this rank's rows of the update; only src_rank has the update, others get None

# %%
given_back.check(redistribute)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# It is the opposite arrow: the same call, with the two lists exchanged.
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
# <details><summary>What the package has for common layouts</summary>
#
# `create_dtensor_config()` and its relatives return all three functions.
#
# </details>
#
# ## Two traps
#
# The first trap gathers the gradient, not the x that Muon hands over (as `momentum_buffer`). In the first step the
# two differ only by a factor, which Newton–Schulz ignores, so a one-step test may pass:

# %% tags=["ranks"]
def gather_gradient(momentum_buffer, dst_rank, state):
    gradient = state["params"][state["param_idx"]].grad.bfloat16()
    return lesson.gather(gradient, dst_rank, state)

print(lesson.try_for_steps(gather_gradient, dp * tp, seed, backend))

# %% [markdown]
# The second forgets that a `Partial` gradient (PyTorch's word for our `{U_dp}`) is one rank's summand only:

# %% tags=["ranks"]
print(lesson.try_partial(dp * tp, seed, backend))

# %% [markdown]
# ## Deal out the work
#
# A step lasts as long as its busiest owner works. Deal out these matrices by work:

# %%
model = lesson.mixed_model(dp, tp)
print(lesson.say_model(model))

# %% [markdown]
# Par is the package's own choice, and you can beat it!
#
# <details><summary>Hint</summary>
#
# Lesson 04 dealt out the costliest first, each to the rank that has least so far. Here that rank must be one of the matrix's holders.
# Keep one running total for each rank, across all parameters.
#
# </details>
#
# *Medium · 8 minutes · required · par 39 GFLOP on the busiest rank*

# %% tags=["stub"]
def assign_by_work(params, state):
    # state["shapes"]: full shapes; state["holders"]: the ranks that may own each; lesson.cost_of(shape): GFLOP
    return ...  # {index: rank}

# %%
shared = lesson.check_shared_work(model)
shared.check(assign_by_work)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A single `busy` adds up the work on all parameters. If you dealt out each kind of matrix by itself, the same rank could be the
# busiest in each. And `min` looks at the holders only, because no other rank may own the matrix.
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
by_work = shared.accepted_or(lesson.longest_first_joint)
lesson.draw_loads(model, by_work(model.params_at(0), model.state))

# %% [markdown]
# ## What ZeRO-3's gathers cost
#
# ZeRO-3 gathers each layer's weights in forward, and again in backward. ZeRO-1 gathers new weights once a step. What
# does a rank send, with AdamW?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def sent(entries, ranks, item):
    # entries: of all weights together; item: bytes of one entry, be it of a weight or of a gradient
    return {"ZeRO-1": ..., "ZeRO-3": ...}  # bytes in one training step on a ring, gradients included

# %%
shards = lesson.check_sent()
shards.check(sent)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A reduce_scatter or an all_gather sends all shares but one, `(ranks - 1) / ranks` of the entries. ZeRO-1 needs one of
# each, and ZeRO-3 gathers once more. In exchange, it divides the memory of weights and gradients by `ranks`, too.
# (With Muon, both also gather `x`, the input of Newton–Schulz.)
#
# ```python
# def sent(entries, ranks, item):
#     once = (ranks - 1) * entries * item // ranks
#     return {"ZeRO-1": 2 * once, "ZeRO-3": 3 * once}
# ```
#
# </details>

# %%
for name, size in shards.accepted_or(lesson.sent)(8_000_000_000, 64, 2).items():
    print(f"{name}, 8 billion bfloat16 entries over 64 ranks: {size / 1e9:.1f} GB")

# %% [markdown]
# <details><summary>A build of two and a half hours, without a stub: ZeRO-3 on your ring</summary>
#
# In the folder of your `ring.py`, `python -m muon_tutorial.learn.builds zero3` writes `test_zero3.py`. Run it with
# `python test_zero3.py`. It fails, because there is no `zero3.py`. Write that file, and go on until all four stages
# are green.
#
# 1. `shard(model)` gets a `Sequential` whose layers all have weights. It flattens each parameter, a bias too, pads it
#    with zeros and cuts it into equal parts; rank r's parameter is part r. It returns a module, which gathers a
#    layer's weights before the layer computes, in forward and again in backward, drops them afterwards, and averages
#    their gradients in a reduce_scatter. Write `whole(module)`, too: it returns a list of the whole parameters.
# 2. All of this travels on your ring: `from muon_tutorial.learn.builds import ring` gives your `ring.py`, with the
#    reference for what it lacks. In a step, a part travels around three times. Messages have no names, so let one
#    thread alone call the ring, in an order that is the same on all ranks: two calls at once would take each other's
#    messages, and Gloo would end the process.
# 3. While a layer computes, that thread is already in `ring.all_gather` for the weights that are needed next, and for
#    no others: in forward those of the next layer, in backward those of the layer before.
# 4. `shard(model, dtype=torch.bfloat16)` sends weights in bfloat16, and computes in float32 with what arrives. Gradients
#    travel in float32, the parts stay float32, and `whole` returns them as they are.
#
# </details>
#
# <details><summary>A hint for the build: gathers and backward</summary>
#
# A `torch.autograd.Function` has a backward of its own, so it can gather in forward and reduce_scatter in backward.
# `torch.utils.checkpoint` computes a layer again in backward: a second call of your function.
#
# </details>
#
# <details><summary>A hint for the build: two things at once</summary>
#
# `lane = concurrent.futures.ThreadPoolExecutor(1)` calls functions beside your program, in the order in which you
# submit them. `lane.submit(f, x)` returns a future at once; the future's `.result()` waits. How does your function
# know whether it runs in forward or in backward? `checkpoint` calls it twice with the same arguments.
#
# </details>
#
# <details><summary>A solution of the build, and why it is so</summary>
#
# It is `muon_tutorial/learn/builds/reference/zero3.py`. One lane sends everything, also the reduce_scatter of
# backward. If each collective had a thread of its own, two of them could send to the next rank at the same time, and
# there a receive might take the wrong message. Every rank submits in one order, so the first message to come is the
# one that is expected. It is
# tempting to begin all gathers at once, but then every rank holds the whole model, which is what ZeRO-3 exists to
# avoid: one layer ahead suffices. bfloat16 has 8 significant bits. If the part itself were bfloat16, steps of less
# than about 1/256 of a weight would be rounded away, and training would stand still.
#
# </details>
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Three functions are enough. Nothing else in Muon knows how you cut.
# - Only the owner gets the matrix, yet all ranks call, even with an empty shard.
# - Owners are global ranks. Ranks that share a parameter must all name the same owner.
# - Gather what you are handed, not the gradient. Reduce a `Partial` gradient first.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {
    "empty": ...,  # nine rows over eight ranks, cut as torch.chunk does: how many ranks have none?
    "step": ...,  # in which step did the gathered gradient first go badly wrong?
}

# %%
lesson.quiz().check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answers = {"empty": 8 - len(torch.arange(9).chunk(8)), "step": 2}
# ```
#
# </details>

# %% [markdown]
# ## Your functions in `muon_step`, on real ranks
#
# `muon_step` gets five matrices, and some ranks have no rows of some. How many collectives does each rank call?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
calls = ...  # a number for each rank, such as [4, 3, 2, 1]

# %% tags=["ranks"]
out, back = gathered.accepted_or(lesson.gather), given_back.accepted_or(lesson.redistribute)
mine = lesson.ThreeFunctions(by_work, out, back)
bits, made = lesson.run_loop(muon_step, mine, dp * tp, seed, backend)
print("the bits of one process, rank by rank:", bits)

# %% tags=["answer"]
compare({"calls": calls}, {"calls": made})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# All ranks call for every matrix, once on the way out and once on the way back.
#
# ```python
# calls = [2 * 5] * (dp * tp)
# ```
#
# </details>

# %% [markdown]
# Your functions wait for each message, so the next lesson asks what a rank may do meanwhile.
#
# *Read on:* [PyTorch FSDP](https://arxiv.org/abs/2304.11277)
