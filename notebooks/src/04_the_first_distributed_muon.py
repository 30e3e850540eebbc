# %% [markdown]
# # 04 · How did the first distributed Muon work?
#
# Once gradients are averaged, all ranks hold the same ones, and all orthogonalize the same matrices. Could they share
# that work, and what would sharing cost?

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
from muon_tutorial.learn import first_muon as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty-five minutes.** At the end you can say who orthogonalizes which matrix in the first published distributed Muon,
# what travels, how much of it is zeros, and when the work is shared badly. You will have found and fixed a bug in it
# that raises no error, on real processes.
#
# *You need* lesson 03: what an all_reduce and an all_gather do, and what they cost. About Newton–Schulz, know only
# that it is the costly part of Muon and turns a gradient into an update of the same shape.
#
# - *Previous:* [03 · What does a collective move?](03_what_does_a_collective_move.ipynb)
# - *Next:* [05 · ZeRO-1 and the virtual buffer](05_zero1_and_the_virtual_buffer.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 04` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
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
from muon_tutorial.learn import first_muon as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
guess, places, fixed, less, fair, toy, quiz = lesson.all_exercises(dp, backend, seed)
_ = my_muon.so_far("04")

# %% [markdown]
# ## Compute once, share the update
#
# The first distributed Muon (modded-nanogpt, 2024) gives each matrix an **owner**, the one rank that runs
# Newton–Schulz on it. Matrix i, counted from 0, goes to rank i modulo dp: **round robin**.
#
# Each rank writes its own updates into a **flat buffer** with a place for every matrix, and leaves zeros elsewhere.
# One all_reduce adds up the buffers. Written as layouts (B: the buffer's entries; `{U_dp}`: the sum over dp is still
# to be taken), that is:
#
# ```text
# y[B]{U_dp} → y[B]      y: the flat updates
# ```
#
# This small GPT has two layers, each with attention's matrices q, k, v and o and the MLP's up and down:

# %% tags=["ranks"]
first = lesson.run_share(lesson.share, dp, backend, seed)
lesson.draw_run(first, "first_muon-first")

# %% [markdown]
# If one more rank joins those in the picture, who owns `down2`, the last of the twelve? And what fraction of all
# buffers together is zero before the sum?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
owner_of_last = ...  # a rank
zeros = ...  # a fraction, such as 0.5

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
# Here is the early code, in our words and without momentum and weight decay:

# %%
def early_share(parameters, rank, ranks):
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.bfloat16)  # the dtype of an update
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
# ## One gradient is missing
#
# Suppose the gradient of `k1` is None on its owner alone, because somebody froze that layer there. Follow `offset`
# through the loop: which matrices get a wrong update? (`up` and `down` have 4,096 entries, all others 1,024. In
# `k1`'s own place zeros are right, because only its owner would compute its update.)
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
# begin too early. Updates that it writes after `k1` land elsewhere, and the sum adds them to what others have put
# there. Or let the real run tell:
#
# ```python
# wrong = lesson.run_share(early_share, dp, backend, seed, lacking="k1").wrong()
# ```
#
# </details>

# %%
print(lesson.say_outcome(torn))

# %% [markdown]
# All ranks agree, because all added up the same buffers. Only a comparison with *one process* finds the mistake.
#
# ## Fix it
#
# The place of a matrix in the buffer must follow from what all ranks know, here the shapes. Write the function so
# that a missing gradient leaves zeros in its own place and changes nothing else.
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
# Now `k1` is not updated, and no one is told. So the package's Muon first asks, in one tiny all_reduce, which rank
# has which gradient, and refuses to step if ranks disagree:

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
# Each entry has one owner, so nothing needs to be added up, and an all_gather is enough. On a ring, rank 0 sends this
# much:

# %%
counted = launch(lesson.count_bytes, dp, args=(dp, seed), backend=backend)
print(lesson.say_bytes(counted[0], dp))

# %% [markdown]
# Gather the owned updates, in bfloat16 (no gradient is missing here). `dist.all_gather(list, tensor)` fills a list
# with the tensors of all ranks. These must be equally long, so pad yours with zeros to the length of the longest.
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
    return ...  # the whole flat buffer, in the order of the matrices

# %%
less.check(gathered_share)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With more ranks than matrices, some rank owns nothing, and `torch.cat` refuses an empty list. The empty tensor
# `mine[:0]` is there for that rank.
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
# ## The busiest rank sets the pace
#
# A step ends when its last update arrives, so what counts is the work of the busiest rank, the **makespan**. A *fair
# share* is all work divided by the number of ranks. With round robin, how many fair shares does the busiest rank get?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def fair_shares(costs, ranks):
    # costs: the work on each matrix, in the order of their numbers
    return ...

# %%
fair.check(fair_shares)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def fair_shares(costs, ranks):
#     loads = [sum(costs[rank::ranks]) for rank in range(ranks)]
#     return max(loads) * ranks / sum(costs)
# ```
#
# </details>

# %% [markdown]
# The smallest GPT-2 has 12 layers, each with four square matrices and two large ones, which take three times the work
# each:

# %%
fair_shares = fair.accepted_or(lesson.shares_by_index)
for ranks in (6, 8, 128):
    print(f"{ranks:3} ranks: the busiest has {fair_shares(lesson.COSTS, ranks):.1f} fair shares")

# %% [markdown]
# Among 6 owners, two get all the large ones. Among 8 the work is even. The picture deals matrices out in two ways: on
# the left by index (round robin), on the right costliest first, each to the rank with the least work so far. Which
# numbers of ranks suit round robin?

# %%
lesson.explore_loads(live=widgets)

# %% [markdown]
# <details><summary>Answer</summary>
#
# With 1, 2, 4 and 8 the work is even, because on each rank there are two square matrices to every large one, as in the
# whole model. Of the picture's numbers, 6 and 12 are most uneven, because a third of the ranks get all large matrices,
# and nothing else.
#
# </details>
#
# Costliest first, known as *longest first*, stays within 4/3 of the least possible makespan. By hand, deal out
# matrices of cost 8, 7, 6, 5 and 4 to two owners: what is the makespan with longest first, and what is the least
# possible?
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
# Does sharing pay on your machine?
#
# <details><summary>Why one process and a pair, and why float32?</summary>
#
# With more ranks than cores we would only measure the cores. The matrices are larger here, so that sharing can pay.
# They are float32, because some CPUs take a hundred times as long with bfloat16.
#
# </details>

# %% tags=["volatile"]
alone = launch(lesson.time_steps, 1, args=(1, seed, steps), backend=backend)
pair = launch(lesson.time_steps, 2, args=(2, seed, steps), backend=backend)
print(lesson.say_clock(alone, pair))

# %% [markdown]
# <details><summary>How to read these times</summary>
#
# If each rank has its own core, a pair in which both do everything takes about as long as one process, since both
# work at the same time. With round robin each rank does half of it and sends a buffer. If the pair takes much longer
# than the single process, its ranks share cores or memory. Then compare only the last two lines.
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Compute once, share the update: each matrix has one owner.
# - An all_reduce sends the flat buffer's zeros as well. An all_gather sends half as many bytes if all ranks own
#   equally much, and more than half if not.
# - Offsets must not depend on what one rank has. If they do, the result is wrong on all ranks alike, without an
#   error.
# - The makespan is the work of the busiest rank. With round robin, work is even only by luck. Longest first stays
#   within 4/3 of the best.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "zeros": ...,  # how many zeros does rank 0 bring to the all_reduce?
    # GPT-2 on 6 ranks (a layer has 6 matrices): how many fair shares has the busiest, with round robin?
    "busiest": ...,
    "bytes": ...,  # how many bytes does rank 0 send if updates are shared by all_gather?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Rank 0 fills the places of its own matrices, and brings zeros for all others. In an all_gather it sends a segment, as
# long as the longest, for each rank but one, at 2 bytes an entry. Six owners meet layers of six matrices, so the busiest
# gets a large matrix, three times the work of a square one, from each of the 12 layers. A fair share is a sixth of all
# work.
#
# ```python
# sizes = 2 * (4 * [1024] + 2 * [4096])
# own = [sum(sizes[rank::dp]) for rank in range(dp)]
# busiest = 12 * 3 / (12 * (4 + 2 * 3) / 6)
# answers = {"zeros": sum(sizes) - own[0], "busiest": busiest, "bytes": 2 * (dp - 1) * max(own)}
# ```
#
# </details>

# %% [markdown]
# ## Your step, on real ranks
#
# Your `gathered_share` takes a step beside `torch.optim.Muon`, both without momentum and weight decay:

# %%
share = less.accepted_or(lesson.gathered)
def step_together(rank):
    parameters = lesson.parameters(seed)
    updates = share(parameters, rank, dp).split([p.numel() for p in parameters])
    for p, update in zip(parameters, updates, strict=True):
        factor = max(1, p.shape[0] / p.shape[1]) ** 0.5
        p.data.add_(update.view_as(p), alpha=-0.1 * factor)
    return [p.detach() for p in parameters]

# %%
single = lesson.parameters(seed)
torch.optim.Muon(single, lr=0.1, momentum=0, nesterov=False, weight_decay=0).step()
together = launch(step_together, dp, backend=backend)
print("the same bits on every rank:", all(all(map(torch.equal, each, single)) for each in together))

# %% [markdown]
# Only the work was shared, so the next lesson asks how each rank can keep a share of the momentum, too.
#
# *Read on:* [Longest first](https://doi.org/10.1137/0117039)
