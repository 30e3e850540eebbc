# %% [markdown]
# # 04 · How did the first distributed Muon work?
#
# After averaging, all ranks hold the same gradients, so each of them orthogonalizes the same matrices and gets the
# same result. Could they share that work, and what would sharing cost?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
# Set-up: nothing happens here where the package is installed.
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
from muon_tutorial.learn import first_muon as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty minutes.** At the end you can say who orthogonalizes which matrix in the first published distributed Muon,
# what travels, how much of it is zeros, and when the work is shared badly. You will have found and fixed a bug in it
# that raises no error, on real processes.
#
# *You need* lesson 03: what an all_reduce and an all_gather do, and what they cost. About Newton–Schulz, know only
# that it is the costly part of Muon and turns a gradient into an update of the same shape.
#
# - *Previous:* [03 · What does a collective move?](03_what_does_a_collective_move.ipynb)
# - *Next:* [05 · ZeRO-1 and the virtual buffer](05_zero1_and_the_virtual_buffer.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 04` makes. It has
#   nothing to install.
#
# *Other grids:* any dp. This lesson does not use tp.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 4
tp: int = 1
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from muon_tutorial import Muon, build_mesh, launch, zeropower_via_newtonschulz
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import first_muon as lesson
from muon_tutorial.learn.widgets.reveal import compare
guess, places, fixed, less, toy, quiz = lesson.all_exercises(dp, backend, seed)
print(lesson.say_axes(dp, tp))

# %% [markdown]
# ## Compute once, share the update
#
# The first distributed Muon (modded-nanogpt, 2024) gives each matrix an **owner**, one rank that runs Newton–Schulz
# on it for all the others. Matrix i, counted from 0, goes to rank i modulo dp, which is called **round robin**.
#
# But every rank needs every update in the end. So each rank fills a **flat buffer** that has a place for every
# matrix: it writes the updates that it owns into their places and leaves zeros everywhere else. Then one all_reduce
# adds up all the buffers. For updates y in B places, it goes from `y[B]{U_dp}`, each rank's own summand, to the sum
# `y[B]`. In each place only one rank has written anything, and x + 0 + 0 + … is x.
#
# Play it, on buffers that real processes have just filled. In this small GPT, `q1` to `o1` are the attention matrices
# of layer 1, and `up1` and `down1` are its MLP.

# %% tags=["ranks"]
first = lesson.run_share(lesson.share, dp, backend, seed)
lesson.explore(first, live=widgets)

# %% [markdown]
# Suppose that one more rank joins. Who then owns the last of the twelve matrices, `down2`? And what part of all the
# buffers together is zero before the sum?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
owner_of_last = ...  # a rank
zeros = ...  # a part of 1, such as 0.5

# %%
guess.check(owner_of_last, zeros)

# %% tags=["answer", "ranks"]
larger = lesson.run_share(lesson.share, dp + 1, backend, seed)
found = {"owner_of_last": 11 % (dp + 1), "zeros": lesson.part_of_zeros(larger)}
compare({"owner_of_last": owner_of_last, "zeros": zeros}, found, lesson.draw_run(larger, "first_muon-larger"))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Twelve matrices, numbered from 0: the last is number 11. Each place is filled on one rank of dp + 1.
#
# ```python
# owner_of_last = 11 % (dp + 1)
# zeros = dp / (dp + 1)
# ```
#
# </details>

# %% [markdown]
# ## All of it, in one cell
#
# This is the early code in our words, without momentum and weight decay; every rank runs it. The buffer is bfloat16,
# 2 bytes an entry, which loses nothing, because Newton–Schulz ends in bfloat16 anyway.

# %%
def early_share(parameters, rank, ranks):
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
    offset = 0
    for number, parameter in enumerate(parameters):
        if number % ranks == rank:  # this one is mine
            if parameter.grad is None:
                continue  # no gradient, nothing to do
            update = zeropower_via_newtonschulz(parameter.grad)
            flat[offset : offset + parameter.numel()] = update.flatten()
        offset += parameter.numel()
    dist.all_reduce(flat)
    return flat

# %% tags=["ranks"]
early = lesson.run_share(early_share, dp, backend, seed)
print(lesson.say_outcome(early))

# %% [markdown]
# These are the bits of one process that does everything.
#
# ## One gradient is missing
#
# Suppose that in this step the gradient of `k1` is None on the rank that owns it, and only there. (Somebody may have
# frozen that layer there.) The code has a line for this. Is that line right?
#
# Follow `offset` through the loop, on the owner of `k1` and on any other rank. Which matrices get a wrong update?
# (`up` and `down` have 4,096 entries here, all others 1,024. Count `k1` as right if its place stays zero, because
# then it does not move.)
#
# <details><summary>Hint</summary>
#
# `continue` skips the rest of the loop's body, the last line included. By how much is `offset` too small from then
# on, and which matrices does this rank still have to write?
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["stub", "predict"]
wrong = ...  # a list of names, such as ["q1", "v2"]

# %%
places.check(wrong)

# %% tags=["answer", "ranks"]
torn = lesson.run_share(early_share, dp, backend, seed, lacking="k1")
compare({"wrong": wrong}, {"wrong": torn.wrong()}, lesson.draw_run(torn, "first_muon-torn"))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `continue` also skips the last line of the loop. So on the owner of `k1`, and only there, all later places
# begin too early. What it owns after `k1` lands elsewhere, on top of what others have put there. Or let
# the real run tell:
#
# ```python
# wrong = lesson.run_share(early_share, dp, backend, seed, lacking="k1").wrong()
# ```
#
# </details>

# %%
print(lesson.say_outcome(torn))

# %% [markdown]
# There is no error, and all ranks agree to the last bit, because all have added up the same buffers. So a test that
# compares ranks with each other passes. Only a comparison with *one process* finds the mistake.
#
# ## Be the saboteur
#
# Pick a rank and a matrix, spoil that one gradient in step 1, and press play. What differs from an undisturbed
# training turns red. Try the owner of a matrix first, then another rank. The green box says whether ranks agree.

# %%
lesson.explore_sabotage(dp, live=widgets)

# %% [markdown]
# By step 2 everything is red, because wrong weights give wrong gradients, and still the ranks agree. On a rank that
# does not own the matrix nothing happens, because the spoilt copy is never read.
#
# ## Fix it
#
# All ranks must agree where something stands in a buffer. So its place must follow from what all know, here the
# shapes, and never from what one happens to have. Write the function again, so that a missing gradient leaves zeros
# in its own place and changes nothing else.
#
# <details><summary>Hint</summary>
#
# Only the owner's two lines depend on the gradient. Which condition can you put around them, so that `offset` grows
# in any case?
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def fixed_share(parameters, rank, ranks):
    return ...  # copy early_share, and fix it

# %% tags=["ranks"]
mine = lesson.run_share(fixed_share, dp, backend, seed, lacking="k1")
lesson.draw_run(mine, "first_muon-mine")

# %%
fixed.check(fixed_share)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def fixed_share(parameters, rank, ranks):
#     flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
#     offset = 0
#     for number, parameter in enumerate(parameters):
#         if number % ranks == rank and parameter.grad is not None:
#             update = zeropower_via_newtonschulz(parameter.grad)
#             flat[offset : offset + parameter.numel()] = update.flatten()
#         offset += parameter.numel()
#     dist.all_reduce(flat)
#     return flat
# ```
#
# </details>

# %% [markdown]
# Is that good enough? `k1` now stands still on all ranks, and no one is told. The package's own Muon first asks, in
# one tiny all_reduce, which rank has which gradient, and refuses to step if ranks disagree.

# %%
def refused(rank):
    lacking = ["k1"] if rank == 1 % dp else []
    muon = Muon(lesson.named_parameters(seed, lacking), strategy="round_robin", mesh=build_mesh({"dp": dp}))
    muon.step()

# %% tags=["volatile", "raises-exception"]
try:
    launch(refused, dp, backend=backend)
except RankFailedError as error:
    print(lesson.say_refusal(error))

# %% [markdown]
# ## Leave the zeros at home
#
# If each entry has one owner, nothing needs adding up, so an all_gather is enough. This is what rank 0 sends in a
# step, on a ring, either way:

# %%
counted = launch(lesson.count_bytes, dp, args=(dp, seed), backend=backend)
print(lesson.say_bytes(counted[0], dp))

# %% [markdown]
# Write it yourself. Bring only the updates that this rank owns, and return the whole flat buffer in the order of the
# matrices. The segments of an all_gather have to be equally long, so fill yours up to the longest.
#
# <details><summary>Hint</summary>
#
# Two orders meet here. Segments arrive rank by rank, and the result goes matrix by matrix. While you walk over the
# matrices, remember for each owner how much of its segment you have used.
#
# </details>
#
# *Medium · 10 minutes · required · par 36864 bytes*

# %% tags=["stub"]
def gathered_share(parameters, rank, ranks):
    owned = [parameters[owner::ranks] for owner in range(ranks)]
    return ...

# %%
less.check(gathered_share)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def gathered_share(parameters, rank, ranks):
#     owned = [parameters[owner::ranks] for owner in range(ranks)]
#     sizes = [sum(p.numel() for p in each) for each in owned]
#     mine = torch.zeros(max(sizes), dtype=torch.bfloat16)
#     own = [zeropower_via_newtonschulz(p.grad).flatten() for p in owned[rank]]
#     mine[: sizes[rank]] = torch.cat([mine[:0], *own])
#     segments = [torch.empty_like(mine) for _ in range(ranks)]
#     dist.all_gather(segments, mine)
#     flat, taken = [], [0] * ranks
#     for number, parameter in enumerate(parameters):
#         owner, size = number % ranks, parameter.numel()
#         flat.append(segments[owner][taken[owner] : taken[owner] + size])
#         taken[owner] += size
#     return torch.cat(flat)
# ```
#
# </details>

# %% [markdown]
# You send half the bytes if all ranks own equally much. If they do not, you save less, because each segment is as
# long as the longest. Then why did the early code use an all_reduce? It is simpler: one buffer, one offset, no
# segments.
#
# ## The busiest rank sets the pace
#
# A step cannot end before its last update has arrived, so the rank with the most work sets the pace. Its work is the
# **makespan**. At best it is a *fair share*, all the work divided by the number of ranks. We count work in
# operations, because that needs no clock:

# %%
def newton_schulz_cost(rows, columns, iterations=5):
    short, long = sorted((rows, columns))
    return iterations * (4 * short**2 * long + 2 * short**3)

for shape in ((768, 768), (768, 3072)):
    print(f"{shape}: {newton_schulz_cost(*shape) / 1e9:.1f} GFLOP (10⁹ operations)")

# %% [markdown]
# The smallest GPT-2 has 12 layers, each with four square matrices and two large ones. On the left they are dealt out
# by index. On the right, costliest first, each goes to the rank with the least work so far. Which numbers of ranks
# suit round robin?

# %%
lesson.explore_loads(live=widgets)

# %% [markdown]
# At 6, some ranks get all the large matrices, because each layer has 6 matrices. With 8, all ranks get equal work,
# and the early code was made for 8 GPUs. With more ranks than matrices no order helps, because many have nothing to
# do. With 128, the busiest rank has this many times a fair share:

# %%
print(f"{lesson.fair_shares(128, 'longest first'):.1f}")

# %% [markdown]
# Longest first, known as LPT, never takes more than 4/3 of the best possible makespan. But is it always the best? By
# hand, deal out matrices of cost 8, 7, 6, 5 and 4 to two owners, longest first. What is the makespan, and what is the
# least possible one?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
longest_first = ...
best = ...

# %%
toy.check(longest_first, best)

# %% tags=["answer"]
compare({"longest_first": longest_first, "best": best}, lesson.toy_makespans(), lesson.draw_toy())

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# First 8 and 7 go to different owners. Then 6 goes to the one with 7, and 5 to the one with 8. Now both have 13, and
# one of them has to take the 4.
#
# ```python
# longest_first = 17
# best = 15
# ```
#
# </details>

# %% [markdown]
# ## Against the clock
#
# We time one process and a pair, because with more ranks than cores we would only measure the cores. The matrices are
# larger here, so that sharing can pay. They are float32, because some CPUs take a hundred times as long with
# bfloat16.

# %% tags=["volatile"]
alone = launch(lesson.time_steps, 1, args=(1, seed, steps), backend=backend)
pair = launch(lesson.time_steps, 2, args=(2, seed, steps), backend=backend)
print(lesson.say_clock(alone, pair))

# %% [markdown]
# <details><summary>How to read these times</summary>
#
# If each rank has its own core, a pair in which both do everything takes about as long as one process, since all work
# is done twice at once. With round robin each rank does half of it and sends a buffer. If the pair takes much longer
# than the single process, its ranks share cores or memory. Then compare only the last two lines.
#
# </details>
#
# Last, add momentum and weight decay: two steps with the package's Muon, beside `torch.optim.Muon` in one process:

# %%
def two_steps(rank=None):
    parameters = lesson.parameters(seed)
    shared = {"strategy": "round_robin", "mesh": build_mesh({"dp": dp})} if rank is not None else {}
    muon = (torch.optim.Muon if rank is None else Muon)(parameters, lr=0.1, **shared)
    muon.step()
    muon.step()
    return [parameter.detach() for parameter in parameters]

# %%
single, together = two_steps(), launch(two_steps, dp, backend=backend)
print("the same bits on every rank:", all(all(map(torch.equal, each, single)) for each in together))

# %% [markdown]
# Only the work was shared. Every rank still keeps all of the momentum.
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Compute once, share the update: each matrix has one owner.
# - An all_reduce sends the flat buffer's zeros as well. An all_gather sends half the bytes at best.
# - Offsets must not depend on what one rank has. If they do, the result is wrong on all ranks alike, without an
#   error.
# - The makespan is the work of the busiest rank. Dealt out by index, work is even only by luck. Longest first stays
#   within 4/3 of the best.
#
# </details>
#
# **Quiz.** You can find each answer with one line of code.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "zeros": ...,  # how many zeros does rank 0 bring to the all_reduce?
    # on as many ranks as a layer has matrices, how many fair shares has the busiest one, by index?
    "busiest": ...,
    "bytes": ...,  # how many bytes does rank 0 send if updates are shared by all_gather?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# sent = counted[0][1].ring
# answers = {"zeros": first.zeros(0), "busiest": lesson.fair_shares(6), "bytes": sent}
# ```
#
# </details>

# %% [markdown]
# The next lesson cuts up the momentum as well, so that a rank owns a range of a buffer and no longer a matrix.
