# %% [markdown]
# # 04 · How did the first distributed Muon work?
#
# **Thirty minutes.** At the end you can say who orthogonalizes which matrix in the first published
# distributed Muon, what travels, how much of it is zeros, and when the work is shared badly. And you have
# mended a bug in it that raises no error, on real processes.
#
# *You need* lesson 03: what an all_reduce and an all_gather do, and what they cost. Of Newton–Schulz, only
# that it is the costly part of Muon: it turns a gradient into an update of the same shape.
#
# - *Previous:* [03 · What does a collective move?](03_what_does_a_collective_move.ipynb)
# - *Next:* [05 · ZeRO-1 and the virtual buffer](05_zero1_and_the_virtual_buffer.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 04` makes. It has
#   nothing to install.

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
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import torch
import torch.distributed as dist
from muon_tutorial import Muon, build_mesh, launch, zeropower_via_newtonschulz
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import first_muon as lesson

# %% [markdown]
# ## Compute once, share the answer
#
# `dp` ranks train one model, each on other data. Before the optimizer steps, they average their gradients.
# From then on all of them hold the same parameters and the same gradients. If each now calls Muon, each runs
# the same Newton–Schulz on the same matrices, and finds the same updates: in this lesson, the *answers*. The
# work is done dp times.
#
# The first distributed Muon (in modded-nanogpt, 2024) does it once. Number the matrices from 0. Matrix i
# belongs to rank i modulo dp, its **owner**. To deal out in turn like this is called **round robin**. Only
# the owner runs Newton–Schulz. But then all the others need its answer.
#
# So each rank makes a **flat buffer** with a place for every answer, one after the other, all zero. It writes
# the answers that it owns into their places, and leaves the rest at zero. Then one all_reduce adds up all
# buffers. In each place only one rank has written, and x + 0 + 0 + … is x: now everybody has all answers.
#
# Here are the buffers of real processes, run just now. The model is a GPT with two layers of six matrices:
# `q1` to `o1` belong to the attention of layer 1, `up1` and `down1` to its MLP. Press the moments one after
# the other, then compare ranks. Grey is zero.

# %% tags=["ranks"]
print(lesson.say_axes(dp, tp))
guess, places, mend, quiz = lesson.all_exercises(dp, backend, seed)
first = lesson.run_share(lesson.share, dp, backend, seed)
lesson.explore(first, live=widgets)

# %% [markdown]
# Colours are owners. Every place is filled on one rank only; on all others it is zero. Those zeros are what
# you pay: the all_reduce sends and adds them like any other numbers.
#
# ## Predict
#
# Suppose that one more rank joins, so that there are dp + 1. Which rank owns the last matrix, `down2`? And
# what part of all numbers in all buffers together is zero, before the sum?
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
owner_of_last = ...  # a rank
zeros = ...  # a part of 1, such as 0.5

# %%
guess.check(owner_of_last, zeros)

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
# ## The whole of it, in one cell
#
# This is the early code, told again in our words (momentum and weight decay left out). It runs on every rank.
# `parameters` are all matrices, each with its gradient in `.grad`. `offset` says where the next place begins.
# `dist.all_reduce` is where bytes travel.

# %%
def early_share(parameters, rank, ranks):
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
    offset = 0
    for number, parameter in enumerate(parameters):
        if number % ranks == rank:  # this one is mine
            if parameter.grad is None:
                continue  # no gradient, nothing to do
            answer = zeropower_via_newtonschulz(parameter.grad)
            flat[offset : offset + parameter.numel()] = answer.flatten()
        offset += parameter.numel()
    dist.all_reduce(flat)
    return flat

# %% [markdown]
# The buffer holds bfloat16, 2 bytes a number. Newton–Schulz ends in bfloat16, so nothing is lost on the way.
# Does it give what one process finds that orthogonalizes all matrices by itself?

# %% tags=["ranks"]
early = lesson.run_share(early_share, dp, backend, seed)
print(lesson.say_outcome(early))

# %% [markdown]
# Same bits, on every rank. Time to break it.
#
# ## One gradient is missing
#
# After averaging, all ranks should have the same gradients. But suppose that one rank's data took a branch of
# the model that skips a matrix, and that whoever wrote the averaging did not think of it. Say that in this
# step the gradient of `k1` is None, on the rank that owns `k1`, and only there. All other gradients are there,
# on all ranks. The code above foresees a None. Or does it?
#
# Follow `offset` through the loop, on the owner of `k1` and on any other rank. Then predict: which matrices
# get a wrong answer? (Here `up` and `down` have 4,096 numbers each, all others 1,024. `k1` itself is right if
# its place stays zero: then nobody changes it.)
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
wrong = ...  # a list of names, such as ["q1", "v2"]

# %%
places.check(wrong)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `continue` also skips the last line of the loop. So on the owner of `k1`, and only there, all later places
# begin too early. What it owns after `k1` is put elsewhere, and added to what others have put there. Or let
# the real run tell:
#
# ```python
# wrong = lesson.run_share(early_share, dp, backend, seed, lacking="k1").wrong()
# ```
#
# </details>

# %% [markdown]
# Now run it, with the same function.

# %% tags=["ranks"]
torn = lesson.run_share(early_share, dp, backend, seed, lacking="k1")
print(lesson.say_outcome(torn))

# %%
lesson.draw_run(torn, "first_muon-torn")

# %% [markdown]
# No error, and training would go on. All ranks even agree to the last bit, as they have added up the same
# buffers: a test that compares ranks with each other passes. Only a comparison with *one process* shows it.
# That is why this course asks for the same bits so often.
#
# The rule behind it: where something lies must follow from what all ranks know alike (here the shapes), and
# never from what one rank happens to have.
#
# ## Mend it
#
# Write the function anew, so that a missing gradient leaves a place of zeros and nothing else changes. It is
# tried with several missing gradients, on real ranks.
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def mended_share(parameters, rank, ranks):
    return ...  # copy early_share, and mend it

# %% [markdown]
# These are the buffers of *your* function, with the gradient of `k1` missing as before.

# %% tags=["ranks"]
mine = lesson.run_share(mended_share, dp, backend, seed, lacking="k1")
lesson.draw_run(mine, "first_muon-mine")

# %%
mend.check(mended_share)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def mended_share(parameters, rank, ranks):
#     flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
#     offset = 0
#     for number, parameter in enumerate(parameters):
#         if number % ranks == rank and parameter.grad is not None:
#             answer = zeropower_via_newtonschulz(parameter.grad)
#             flat[offset : offset + parameter.numel()] = answer.flatten()
#         offset += parameter.numel()
#     dist.all_reduce(flat)
#     return flat
# ```
#
# </details>

# %% [markdown]
# Is that good enough? `k1` stays as it was, on all ranks, though some of them had a gradient for it. Nobody
# is told. The package's own Muon asks before each step who has which gradient, in one tiny all_reduce. Where
# ranks disagree it refuses the step, before any parameter has changed. (If *no* rank has it, the matrix is
# skipped; so with dp = 1 there is nothing to refuse.)

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
# ## The price of zeros
#
# An all_reduce moves the buffer twice, as lesson 03 has shown: reduce_scatter, then all_gather. But there is
# nothing to add here, as each number has one owner. So an all_gather is enough, in which each rank sends its
# own answers only. The package does either. Here is what rank 0 sends in one step, as a ring. The first row
# comes before: the gradients have to be averaged in any case.

# %%
counted = launch(lesson.count_bytes, dp, args=(dp, seed), backend=backend)
print(lesson.say_bytes(counted[0], dp))

# %% [markdown]
# Half, if all ranks own equally many numbers. Where they do not, every rank's piece is filled up to the
# longest, and an all_gather saves less. With more ranks than matrices it saves nothing.
#
# Then why an all_reduce in the first place? It needs no thought: one buffer, one offset, the same on all
# ranks, whoever owns what.
#
# ## Who is waiting for whom?
#
# Nobody can go on before the all_reduce has everybody's answers. So a step takes as long as the *busiest*
# rank. Its work is called the **makespan**. At best it is a *fair share*: all the work, divided by the number
# of ranks. Newton–Schulz on an s × l matrix (s the shorter side) takes 4s²l + 2s³ operations in each of its
# five iterations. So we can count work, in GFLOP (10⁹ operations), and need no clock.
#
# Take a model of the size of GPT-2's smallest: twelve layers, each of four square matrices and two that are
# four times as large. Move the slider. On the left they are dealt out by index. On the right the costliest
# come first, each to the rank that has least so far.

# %%
lesson.explore_loads(live=widgets)

# %%
print(lesson.say_makespans())

# %% [markdown]
# It is often said that this way the work scales with the number of ranks. The table says when. A layer has six
# matrices. Deal them out to as many ranks, and two of the ranks get all the large ones. With 8 it comes out
# even: the early code was made for 8 GPUs, and for numbers of layers that fit. To sort first is as simple, and
# needs no luck. (It is known as LPT, longest processing time first.)
#
# In the last row there are more ranks than matrices. No order helps: whoever has one large matrix takes as
# long as that takes, and many have nothing to do. Lesson 12 comes back to this.
#
# ## Against the clock
#
# The clock only for one process and for a pair, since more ranks than cores would measure the cores. The
# matrices are larger here, so that there is something to share. The fastest of a few steps counts.

# %% tags=["volatile"]
alone = launch(lesson.time_steps, 1, args=(1, seed, steps), backend=backend)
pair = launch(lesson.time_steps, 2, args=(2, seed, steps), backend=backend)
print(lesson.say_clock(alone, pair))

# %% [markdown]
# With a free core for each rank, a pair that does everything takes about as long as one process: all the work
# twice, for the same answers. Round robin takes between half of that and all of it: half the work, and a buffer
# to send. (If the pair took twice as long, its ranks had to share a core. Run the cell again when nothing else
# runs.)
#
# ## Is it the same step?
#
# Last, the real thing: momentum, weight decay, two steps, and the package's round robin on real ranks.
# Against it `torch.optim.Muon` in one process, with the same gradients.

# %%
def two_steps(rank):
    parameters = lesson.parameters(seed)
    muon = Muon(parameters, lr=0.1, strategy="round_robin", mesh=build_mesh({"dp": dp}))
    muon.step()
    muon.step()
    return [parameter.detach() for parameter in parameters]

# %%
single = lesson.parameters(seed)
muon = torch.optim.Muon(single, lr=0.1)
muon.step()
muon.step()
together = launch(two_steps, dp, backend=backend)
print("the same bits on every rank:", all(all(map(torch.equal, mine, single)) for mine in together))

# %% [markdown]
# Only work was shared. Every rank still keeps all gradients and all of the momentum. That is for the next lesson.
#
# ## Recap
#
# - Compute once, share the answer: each matrix has one owner, and all get its answer.
# - The answers travel in one flat buffer. An all_reduce sends its zeros, too. An all_gather sends half the
#   bytes at best.
# - Offsets must not depend on what one rank has: a skipped one is silently wrong, on all ranks alike.
# - A step takes as long as the busiest rank. To deal out by index is even only by luck.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above.
#
# 1. `zeros`: how many zeros does rank 0 hand to the all_reduce?
# 2. `busiest`: on as many ranks as a layer has matrices, how many fair shares has the busiest one, by index?
# 3. `bytes`: how many bytes does rank 0 send if answers are shared by all_gather?

# %% tags=["stub"]
answers = {"zeros": ..., "busiest": ..., "bytes": ...}

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
