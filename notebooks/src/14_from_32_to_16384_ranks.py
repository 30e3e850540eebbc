# %% [markdown]
# # 14 · What changes when ranks go from 32 to 16,384?
#
# Every doubling of the ranks makes twice as many owners for the same matrices. Which owners still have something to
# do, and what does a step wait for?

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
from muon_tutorial.learn import many_ranks as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty-five minutes.** At the end you can say, for any model on any grid, what a step waits for: work, bytes,
# latency or one matrix. You have planned models that no laptop can hold.
#
# *You need* lesson 04 (owners and their makespan), lesson 10 (the bill) and lesson 13 (the strategies).
#
# - *Previous:* [13 · Is Muon cheaper than AdamW?](13_is_muon_cheaper.ipynb)
# - *Next:* [15 · It hangs, or lies. Which rank, which line?](15_it_hangs_or_lies.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 14` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *All seconds here are predicted.* The planner walks the package's own step without data and computes its time from a
# file that describes a machine, `muon_tutorial/timing/machines/h100-infiniband.json`. That file says where each number
# comes from, and which are estimates. Near the end, clocks on up to 256 GPUs stand beside the planner's seconds.
#
# Nothing here runs on ranks. Of the parameters below, this lesson uses `widgets` alone.
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
from muon_tutorial.learn import many_ranks as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
_ = my_muon.so_far("14")

# %% [markdown]
# ## A grid you have not seen
#
# In the picture of the 70B a matrix *lives* at one place along dp, whose tp ranks hold its pieces: `W[I, J_tp]@dp=k`.
# All tp ranks of this place gather the matrix and repeat its Newton–Schulz. In this lesson the whole place counts as
# one owner, so there are dp owners.
#
# <details><summary>Which strategy, and which others there are</summary>
#
# It is `layerwise` with `tp="repeat"`. Lesson 13's table has `tp="share"`: each matrix goes to one of these ranks.
# Under `owner`, any rank of the grid can own one.
#
# </details>
#
# Predict for a smaller model, `llama-3.1-8b`, with 7 matrices in each of 32 layers and tp=8:
#
# *Easy · 4 minutes · required*

# %% tags=["stub", "predict"]
idle = ...  # how many owners have nothing to do on 4,096 ranks?
shrinks = ...  # how many times faster is the busiest owner's work on 4,096 ranks than on 2,048? (1: no faster)
slower = ...  # True or False: a step takes longer on 16,384 ranks than on 4,096

# %%
unseen, enough, wired, quiz, most = lesson.all_exercises()
unseen.check(idle, shrinks, slower)

# %% tags=["answer"]
print(lesson.say_steps(lesson.UNSEEN))
compare({"idle": idle, "shrinks": shrinks, "slower": slower}, lesson.unseen())

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# 4,096 / 8 owners share 7 · 32 matrices. On half as many ranks there are 256 owners, which is already enough for one
# matrix each. From there on, more ranks do not shorten Newton–Schulz, and only make the step longer.
#
# ```python
# idle = 4096 // 8 - 7 * 32
# shrinks = 1
# slower = True
# ```
#
# </details>

# %% [markdown]
# <details><summary>Why does latency grow, and jump beyond 1,024?</summary>
#
# On a ring, latency would grow with the ranks: 2 (P − 1) messages, one after the other (lesson 03). So libraries
# change to a tree, in which each doubling of the ranks adds one level. The jump comes where matrices run out. As long
# as an owner has several matrices, one call carries them together. After that, every matrix needs a call of its own.
#
# </details>
#
# When matrices run out, a **floor** remains: the time of the costliest matrix. With how many owners do you reach it?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def enough_owners(seconds):
    # seconds: Newton–Schulz of each matrix, on one owner
    # lesson.busiest(seconds, owners): the busiest owner's seconds, dealt out as in lesson 11
    return ...  # the fewest owners who all end within the costliest matrix's time

# %%
enough.check(enough_owners)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `sum(seconds) / max(seconds)`, rounded up, may be too few, because a matrix goes to one owner as a whole. So the
# code deals all matrices out, with one more owner each time.
#
# ```python
# def enough_owners(seconds):
#     owners = 1
#     while lesson.busiest(seconds, owners) > max(seconds):
#         owners += 1
#     return owners
# ```
#
# </details>

# %%
enough_owners = enough.accepted_or(lesson.enough_owners)
for model in (lesson.UNSEEN, lesson.MODEL):
    owners = enough_owners(lesson.seconds_of(model))
    print(f"{model}: {owners} owners, so with tp=8 no more than {8 * owners:,} ranks help")

# %% [markdown]
# At which numbers of ranks do faster links help?

# %%
lesson.explore_scale(live=widgets)

# %% [markdown]
# They help where ranks are many, because there a step mostly waits for bytes.
#
# ## Inside a node and between nodes
#
# A node is one machine with 8 GPUs and 8 network cards. All dp rings that pass through a node share its cards evenly:
# with tp=1 one ring has all eight cards, with tp=8 eight rings have one card each. If each rank sends its part of the
# gradients once, in fp32, how many seconds does that take?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def reduce_seconds(entries, tp, card):
    # entries: of the whole model; card: bytes that one network card sends in a second; tp: 1, 2, 4 or 8
    return ...

# %%
wired.check(reduce_seconds)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# tp divides both the bytes and the bandwidth: a rank sends fewer bytes, over a smaller share of the cards.
#
# ```python
# def reduce_seconds(entries, tp, card):
#     sent = 4 * entries / tp
#     wire = card * 8 / tp
#     return sent / wire
# ```
#
# </details>

# %%
print(lesson.say_wires())

# %% [markdown]
# ## Experts have owners of their own
#
# In Kimi K2, ep spreads the experts over ranks. Only a rank that holds an expert can own it:

# %%
print(lesson.say_experts())

# %% [markdown]
# Each owner has many experts, so their work balances by itself. But an owner has only two or three dense matrices,
# so the costliest sets the floor.
#
# <details><summary>How tokens get to their experts</summary>
#
# In forward, each rank sends its tokens to the ranks that have their experts, and the results come back: two
# all_to_alls, and two more in backward ([GShard](https://arxiv.org/abs/2006.16668)). For experts, Muon's step sends
# nothing from one place along ep to another, because no expert has parts at two places.
#
# </details>
#
# ## Even entries, uneven work
#
# Take four layers of DeepSeek V3. The largest matrix has eight times as many entries as an expert's (2,048 × 7,168),
# and thirty times the work:

# %%
print(lesson.say_shapes())
print(lesson.say_balance())

# %% [markdown]
# If all owners have equally many entries, the busiest has 1.5 fair shares of the work. So deal matrices
# out by work, as in lesson 11.
#
# ## Against a clock
#
# Others have timed Muon on 1 to 256 GPUs. How far off is the *planner*, which predicted the seconds above?

# %%
print(lesson.say_clocked())

# %% [markdown]
# For Newton–Schulz alone the planner is at most 1.5 times off here. For steps it is up to 5.1 times off. So at 16,384
# ranks, trust its counts, such as idle owners and bytes, more than its seconds.
#
# <details><summary>Why so far off, sources, and worse rows</summary>
#
# Newton–Schulz is products of known sizes. In a step it also matters what is sent, when, and over which links. HSDP's
# optimizer sends during the next forward pass, which the planner does not know. The speed of the links between the
# A800s' nodes was not published, and for GB300s the planner took the rates of B200s. From 8 to 32 H100s Newton–Schulz
# gets 3.3 times faster; the planner says 4.0.
#
# `results/published.md` has the source of each row, what had to be assumed, and what the planner gets wrong: batches
# of thin matrices, for example, are planned 27 times too slow, and a ratio of two planned times is up to 2.5 times
# off.
#
# </details>
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - More ranks divide the work until matrices run out. Then the costliest matrix is the floor.
# - A rank's work shrinks, but the bytes that it sends hardly change, so in the end a step waits for them.
# - Latency grows by one level of a tree with each doubling of the ranks, and jumps where matrices run out.
# - With tp, a rank sends fewer bytes between nodes, but over fewer cards, by the same factor. Nothing is gained.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
first, *_, last = lesson.steps()  # on 32 and on 16,384 ranks: .owners, .matrices, .floor and .latency, in seconds
answers = {
    "idle": ...,  # how many owners of the 70B have nothing on 16,384 ranks?
    "floor": ...,  # how many milliseconds does its costliest matrix take?
    "latency": ...,  # how many times as long is latency there as on 32 ranks?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# first, *_, last = lesson.steps()
# answers = {"idle": last.idle_owners, "floor": 1000 * last.floor, "latency": last.latency / first.latency}
# ```
#
# </details>

# %% [markdown]
# ## Until when does backward hide the gradients?
#
# While DDP, PyTorch's plain data parallelism, averages one bucket's gradients, in bf16, backward computes the next
# bucket's. The ranks along dp share a batch evenly, and backward takes 4 operations for each token and each entry that
# a rank holds. Up to how many ranks along dp can backward hide the all_reduces, if an all_reduce takes time for its
# bytes only, and none for latency?
#
# <details><summary>Hint</summary>
#
# Write down both times, for a rank with n entries on a ring of P ranks. An all_reduce sends 2 (P − 1) shares (lesson
# 10). Then divide one by the other, and see what cancels.
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def most_ranks(tokens, flops, bandwidth):
    # tokens: in the whole batch; flops: operations of a rank in a second; bandwidth: bytes that it sends in a second
    return ...  # a whole number, at least 1

# %%
most.check(most_ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Backward takes 4 · n · tokens / (P · flops) seconds. A share has 2 · n / P bytes, so the all_reduces take
# 4 · n · (P − 1) / (P · bandwidth). Both times contain n / P, which cancels, so P − 1 ≤ tokens · bandwidth / flops for
# a model of any size.
#
# ```python
# def most_ranks(tokens, flops, bandwidth):
#     backward = 4 * tokens / flops  # · n / P
#     share = 2 * 2 / bandwidth  # · n / P, out and back; a rank sends P − 1 of them
#     return 1 + int(backward / share)
# ```
#
# </details>

# %% [markdown]
# The planner adds the latency of each all_reduce, so in the picture, backward and all_reduces meet at fewer ranks than
# your number.
#
# <details><summary>For which GPUs, and how many tokens?</summary>
#
# H100s at 400 TFLOP/s, as in [Llama 3's training](https://arxiv.org/abs/2407.21783), with 4 million tokens.
#
# </details>

# %%
most_ranks = most.accepted_or(lesson.most_ranks)
lesson.draw_hidden(most_ranks(lesson.TOKENS, lesson.FLOPS, lesson.card()))

# %% [markdown]
# ## And with ZeRO-3, or with tp?
#
# ZeRO-3 sends half as much again as DDP: it gathers the weights in forward and again in backward. And tp adds up an
# MLP's outputs. Up to how many ranks can computing hide that?
#
# *Easy · 5 minutes · required*

# %% tags=["stub", "predict"]
# forward takes 2 operations for each token and entry, and in backward a reduce_scatter sums the gradients
zero3 = ...  # up to how many ranks along dp can computing hide its collectives: "fewer" than DDP's, "as many", "more"?
# tokens × D, times D × F, times F × D: tp cuts both matrices along F, and one all_reduce sums the outputs, tokens × D
# in bf16: up to how many tp ranks does this all_reduce, over network cards, take no longer than the products?
tp_ranks = ...  # a call of your most_ranks can say it; lesson.WIDTH is F

# %% tags=["answer"]
compare({"zero3": zero3, "tp_ranks": tp_ranks}, lesson.found_limits())

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ZeRO-3 sends P − 1 shares in forward, and twice as many in backward. But forward now hides its own part, with 2
# operations for each token and entry, where backward has 4 for two parts. So the limit is the same.
#
# tp's products take 4 · tokens · D · F / (P · flops) seconds, and the all_reduce 4 · tokens · D · (P − 1) / (P ·
# bandwidth). The tokens cancel, and F takes their place: P − 1 ≤ F · bandwidth / flops. A larger batch does not help,
# and over network cards the limit is below a node's 8 GPUs. Over NVLink it could be much larger.
#
# ```python
# zero3 = "as many"
# tp_ranks = most_ranks(lesson.WIDTH, lesson.FLOPS, lesson.card())
# ```
#
# </details>

# %% [markdown]
# <details><summary>An open task: choose a grid for a 70B on 512 GPUs (45 minutes)</summary>
#
# Choose a grid and a strategy for `llama-3.1-70b`, and defend them on one page. Begin with
#
# `python -m muon_tutorial plan llama-3.1-70b --grid dp=64,tp=8 --batch 4194304`
#
# The grid may have dp_shard, too (and pp, but then it has no score), and `--map map.svg` draws the fastest strategy by
# ranks and bandwidth. There is more than one good answer. A good page
#
# 1. says what the step waits for: work, bytes, latency or one matrix;
# 2. compares your grid with two that you rejected, in seconds and in bytes of memory;
# 3. names the planner's weakest point, a number that it was given or a cost that it leaves out (such as idle pipeline
#    stages), and says when you would choose another grid;
# 4. names the measurement that would prove you wrong;
# 5. says, with your `most_ranks`, whether computing could hide what forward and backward send on your grid. The planner
#    counts the optimizer's step alone.
#
# *Score:* what the planner prints for your strategy as `step`, and as bytes `between` nodes, on a grid without pp, with
# all else as above and a `memory` of at most 80 GB (it has no activations). The command above scores 1.79 s and
# 50.5 GB, with `layerwise`. Par is 0.9 s and 34.4 GB.
#
# </details>
#
# <details><summary>A solution of the open task: how to get par, and what the score leaves out</summary>
#
# With `--grid dp_shard=64,tp=8`, FSDP2 cuts each tp piece along `dp_shard`, and `owner` wins. Its `memory` is 3.1 GB a
# rank, because nothing is copied along dp. Each matrix goes to one rank. But the score counts Muon's step alone.
#
# FSDP2 also gathers weights in forward and backward. With tp=8 each rank has a network card to itself, so computing can
# hide these gathers up to the limit of 446 above, and `dp_shard` is only 64. But that limit takes a rank's 65,536
# tokens in one pass, and `memory` has no activations. Besides attention's scores, a layer keeps about [34 bytes for
# each token and hidden entry](https://arxiv.org/abs/2205.05198) until backward. Even if tp and sequence parallelism
# (lesson 07) cut all of them, that makes 34 · 65,536 · 8,192 · 80 layers / 8 = 183 GB a rank, and a GPU has 80. There
# are two ways out:
#
# - *Micro-batches* gather the weights anew, each with fewer tokens to hide behind. Four take 46 GB, and the limit is
#   112. Eight take 23 GB, but the limit is 56, below 64.
# - *Recomputing* (lesson 12) keeps only each layer's input, 2 bytes in place of 34. That is 11 GB in one pass, and
#   2.3 GB for the layer that backward computes again.
#
# tp's all_reduces stay inside a node. Over NVLink they take no longer than the products up to tp=26, but they hide only
# if a library cuts both into pieces. All of that counts bandwidth alone. With pp=8 the step falls to 0.27 s, and there
# the score leaves out the stages' idle time.
#
# </details>

# %% [markdown]
# Among so many ranks one is always broken, so the next lesson asks: which one, and which line?
#
# *Read on:* [Dion's issue 96](https://github.com/microsoft/dion/issues/96)
