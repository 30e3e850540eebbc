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
# **Fifty-five minutes.** The optional exercises take forty more. At the end you can say, for any model on any grid, what a
# step waits for: work, bytes, latency or one matrix. You have planned models that no laptop can hold.
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
# comes from, and which are estimates. *Against a clock* says how far off the planner was on up to 256 GPUs.
#
# Only the optional exercises on experts run on ranks. All before them uses, of the parameters below, `widgets` alone.
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
import torch
import torch.distributed as dist
from muon_tutorial.learn import many_ranks as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
_ = my_muon.so_far("14")

# %% [markdown]
# ## A grid you have not seen
#
# In the top picture, of a 70B model, a matrix *lives* at one place along dp, whose tp ranks hold its pieces: `W[I,
# J_tp]@dp=k`. All tp ranks of this place gather the matrix, and each runs the same Newton–Schulz. So this lesson
# calls the whole place one owner, and there are dp owners.
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
unseen, enough, wired, quiz, most, fits, experts, layer = lesson.all_exercises(dp, tp, backend)
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
# change to a tree, in which each doubling of the ranks adds one level.
#
# The jump comes where matrices run out. With 128 owners the planner makes 128 calls each way: each of the 96 MLP
# matrices fills one, and attention's 128 matrices travel four to a call, because four of them have the same owner. With
# 256 owners, each of the 224 matrices has an owner of its own, and so a call of its own. Each call now passes 8 levels,
# not 7, so latency doubles: 224 · 8 is twice 128 · 7.
#
# </details>
#
# More owners help only so far, because a matrix has one owner: the time of the costliest matrix is a **floor**. How
# many owners do you need to reach it?
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
for model in (lesson.UNSEEN, lesson.MODEL):  # the 8B, and the top picture's 70B
    owners = enough_owners(lesson.seconds_of(model))
    print(f"{model}: {owners} owners, so with tp=8 ranks beyond {8 * owners:,} do not help")

# %% [markdown]
# At which numbers of ranks do faster links help?

# %%
lesson.explore_scale(live=widgets)

# %% [markdown]
# <details><summary>Compare</summary>
#
# They help where ranks are many, because there a step mostly waits for bytes.
#
# </details>
#
# ## Inside a node and between nodes
#
# A node is one machine with 8 GPUs and 8 network cards. Each place along tp has a dp ring of its own, and the rings
# that pass through a node share its cards evenly: with tp=1, one ring has all eight, and only one of its ranks in a
# node sends to the next node. If each rank sends its part of the gradients once, in fp32, how many seconds does that
# take?
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

# %% [markdown]
# ## Experts have owners of their own
#
# In Kimi K2, ep spreads the experts over ranks, and only a rank that holds an expert can own it. The other 610 matrices
# are dense, and have 256 owners. A *fair share* is all work divided by the number of owners. If all 610 took equally
# long, how many fair shares would the busiest owner have?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
alike = ...  # in fair shares, as in lesson 04

# %% tags=["answer"]
print(lesson.say_experts())
compare({"alike": alike}, {"alike": round(lesson.shares_by_index([1] * 610, 256), 2)})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Some owners have three matrices, and a fair share is 610 / 256 of one.
#
# ```python
# alike = 3 / (610 / 256)
# ```
#
# </details>

# %% [markdown]
# But they are not alike: the costliest alone takes 5.80 fair shares, and sets the floor.
#
# <details><summary>And the experts?</summary>
#
# Experts are alike, and each of their owners has many, so their work balances by itself.
#
# </details>
#
# ## Against a clock
#
# Others have timed Muon on 1 to 256 GPUs. Compared with their times, the *planner*, which predicted the seconds
# above, is at most 1.5 times off for Newton–Schulz alone (batches of thin matrices aside), and up to 5.1 times for a
# step. Why is a step harder to predict?
#
# <details><summary>Compare</summary>
#
# Newton–Schulz is products of known sizes. In a step it also matters what is sent, when, and over which links. HSDP's
# optimizer, for example, sends during the next forward pass, which the planner does not know.
#
# The speed of the links between the nodes of A800s, older GPUs than the H100, was not published. For GB300s, newer
# ones, the planner took the rates of B200s. From 8 to 32 H100s Newton–Schulz gets 3.3 times faster; the planner says
# 4.0.
#
# `results/published.md` has all rows with their sources, what had to be assumed, and what the planner gets wrong:
# batches of thin matrices are planned 27 times too slow, and a ratio of two planned times is up to 2.5 times off.
#
# </details>
#
# So with many ranks, trust the planner's counts, such as idle owners and bytes, more than its seconds.
#
# ## Up to how many ranks does backward hide the all_reduces?
#
# DDP is PyTorch's plain data parallelism. While it averages one bucket's bf16 gradients, backward computes the next
# bucket's. The ranks along dp share a batch evenly, and backward takes 4 operations for each token and each entry that
# a rank holds. So the more ranks, the less each computes. Up to how many ranks can backward hide the all_reduces, not
# counting latency?
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
# The planner also counts latency, so in the picture the two curves meet at fewer ranks than your number.
#
# <details><summary>For which GPUs, and how many tokens?</summary>
#
# H100s at 400 TFLOP/s, as in [Llama 3's training](https://arxiv.org/abs/2407.21783), with 4 million tokens.
#
# </details>

# %%
most_ranks = most.accepted_or(lesson.most_ranks)
# TOKENS: of the batch; FLOPS: of an H100 in a second; card(): bytes that a network card sends in a second
lesson.draw_hidden(most_ranks(lesson.TOKENS, lesson.FLOPS, lesson.card()))

# %% [markdown]
# ## And with ZeRO-3, or with tp?
#
# ZeRO-3 sends half as much again as DDP: it gathers the weights in forward and again in backward. tp sends, too: it
# adds up an MLP's outputs. For each of the two, up to how many ranks can computing hide what they send?
#
# *Easy · 8 minutes · required*

# %% tags=["stub", "predict"]
# forward takes 2 operations for each token and entry, and in backward a reduce_scatter sums the gradients
# compared with DDP's limit, can computing hide its collectives up to "fewer" ranks along dp, "as many", or "more"?
zero3 = ...
# an MLP multiplies tokens × D by D × F, then by F × D. tp cuts F, so an all_reduce sums the outputs (tokens × D,
# bf16). Over network cards, up to how many tp ranks does this all_reduce take no longer than the products?
tp_ranks = ...  # one call of your most_ranks gives it; lesson.WIDTH is F

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
# and over network cards the limit is below a node's 8 GPUs. Over NVLink, the faster links inside a node, it could be
# much larger.
#
# ```python
# zero3 = "as many"
# tp_ranks = most_ranks(lesson.WIDTH, lesson.FLOPS, lesson.card())
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - More ranks divide the work until matrices run out. Then the costliest matrix is the floor.
# - A rank's work shrinks, but the bytes that it sends hardly change, so in the end a step waits for them.
# - Latency grows by one level of a tree with each doubling of the ranks, and jumps where matrices run out.
# - With tp, a rank sends fewer bytes between nodes, but over fewer cards, by the same factor. Nothing is gained.
# - Backward hides the gradients up to P ranks, where (P − 1) · flops = tokens · bandwidth.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {
    # the 70B has 7 matrices in each of 80 layers: with tp=8, how many owners have nothing to do on 16,384 ranks?
    "idle": ...,
    "ranks": ...,  # with tp=4 in place of 8: up to how many ranks does its Newton–Schulz get faster?
    "cards": ...,  # with tp=2: how many of a node's cards carry one dp ring?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The floor is reached with equally many owners, whatever tp is. But with tp=4 an owner is half as many ranks.
#
# ```python
# answers = {"idle": 16384 // 8 - 7 * 80, "ranks": 4 * enough_owners(lesson.seconds_of(lesson.MODEL)), "cards": 8 // 2}
# ```
#
# </details>

# %% [markdown]
# ## Open: a grid for 512 GPUs
#
# <details><summary>An open task: choose a grid for a 70B on 512 GPUs (45 minutes)</summary>
#
# Choose a grid and a strategy for `llama-3.1-70b`, and defend them on one page. Begin with
#
# `python -m muon_tutorial plan llama-3.1-70b --grid dp=64,tp=8 --batch 4194304`
#
# The grid may have dp_shard, too, which cuts weights along dp as FSDP2 does (and pp, but then it has no score), and
# `--map map.svg` draws the fastest strategy by ranks and bandwidth. There is more than one good answer. A good page
#
# 1. says what the step waits for: work, bytes, latency or one matrix;
# 2. compares your grid with two that you rejected, in seconds and in bytes of memory;
# 3. names the planner's weakest point, a number that it was given or a cost that it leaves out (such as idle pipeline
#    stages), and says when you would choose another grid;
# 4. names the measurement that would prove you wrong;
# 5. says, with `activation_bytes` (the first optional exercise below) and your `most_ranks`, how the activations fit,
#    and whether computing could then hide what forward and backward send on your grid. The planner counts the
#    optimizer's step alone.
#
# *Score:* what the planner prints for your strategy as `step`, and as bytes `between` nodes, on a grid without pp, with
# all else as above. The planner's `memory` and `activation_bytes` together may be at most 80 GB. You may recompute,
# or cut the tokens into micro-batches. The command above scores 1.79 s and 50.5 GB, with `layerwise`. Par is 0.9 s and
# 34.4 GB.
#
# </details>
#
# <details><summary>A solution of the open task: how to get par</summary>
#
# With `--grid dp_shard=64,tp=8`, FSDP2 cuts each tp piece along `dp_shard`, and `owner` wins. Each matrix goes to one
# rank. `memory` is 3.1 GB a rank, because nothing is copied along dp, and recomputing in one pass adds 13 GB.
#
# </details>
#
# <details><summary>A solution of the open task: how activations fit, and what computing then hides</summary>
#
# FSDP2 also gathers weights in forward and backward. With tp=8 each rank has a network card to itself, so computing can
# hide these gathers up to the limit of 446 marked above, and `dp_shard` is only 64. But that limit takes a rank's 65,536
# tokens in one pass, which keeps 183 GB. There are two ways out:
#
# - *Micro-batches* gather the weights anew, each with fewer tokens to hide behind. Four take 46 GB, and the limit is
#   112. Eight take 23 GB, but the limit is 56, below 64.
# - *Recomputing* takes 13 GB in one pass. Forward decides the limit, and has as much to compute as before.
#
# </details>
#
# <details><summary>A solution of the open task: what else the score leaves out</summary>
#
# tp's all_reduces stay inside a node. Over NVLink they take no longer than the products up to tp=26, but they hide only
# if a library cuts both into pieces. All of that counts bandwidth alone. With
# `dp_shard=8,tp=8,pp=8` the step falls to 0.18 s, and there the score leaves out the stages' idle time.
#
# </details>

# %% [markdown]
# ## Optional: do the activations fit?
#
# The limits above assume that a rank takes all its tokens in one pass, and so holds all their activations. Until
# backward, each layer of a GPT keeps about 34 bytes in bf16 for each hidden entry of each token. tp with sequence
# parallelism (lesson 07) cuts all of them. Recomputing (lesson 12) keeps only each layer's input, 2 of the 34 bytes,
# and backward makes one layer at a time whole again.
#
# <details><summary>Where 34 is from</summary>
#
# [Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198): 11 for attention, 19 for the MLP and 4 for the norms.
# Attention's scores are left out, because a library computes them again in any case. A model without dropout, or with
# another MLP, needs somewhat less or more.
#
# </details>
#
# *Easy · 5 minutes · optional*

# %% tags=["stub"]
def activation_bytes(tokens, hidden, layers, tp, recompute):
    # tokens: how many a tp group takes in one pass; hidden: how many entries a token has between layers;
    # recompute: True or False
    # one layer is whole (kept or recomputed), the others are as forward left them
    return ...  # bytes on one rank as backward begins

# %%
fits.check(activation_bytes)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# One layer is whole. Each of the others is, too, or keeps its input alone.
#
# ```python
# def activation_bytes(tokens, hidden, layers, tp, recompute):
#     layer = 34 * tokens * hidden / tp
#     kept = 2 * tokens * hidden / tp if recompute else layer
#     return layer + (layers - 1) * kept
# ```
#
# </details>

# %% [markdown]
# The 70B has 80 layers and 8,192 hidden entries. With dp=64 and tp=8, each tp group gets 65,536 tokens of the batch:

# %%
activation_bytes = fits.accepted_or(lesson.activation_bytes)
for recompute in (False, True):
    kept = activation_bytes(lesson.TOKENS // 64, 8192, 80, 8, recompute)
    print(f"recompute={recompute}: {kept / 1e9:.0f} GB on each rank; an H100 has 80 GB")

# %% [markdown]
# ## Optional: how tokens get to their experts
#
# In forward, each rank sends each token to the rank that has its expert
# ([GShard](https://arxiv.org/abs/2006.16668)). Lesson 11's `all_to_all_single` does it, but here no rank knows how many
# tokens will come.
#
# <details><summary>Hint</summary>
#
# Let each rank tell every other how many tokens it will send, with an `all_to_all_single` of one number for each. And
# the call cuts its input into runs, so which tokens must stand together?
#
# </details>
#
# *Medium · 10 minutes · optional*

# %% tags=["stub"]
def to_experts(tokens, expert_of, group):
    # tokens: this rank's, one in each row; expert_of: the expert of each; rank r of the group has expert r
    return ...  # the tokens of this rank's expert: first those that rank 0 of the group sent, then rank 1's, and so on

# %%
experts.check(to_experts)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `argsort` puts tokens for one expert next to each other. The ranks first exchange how many there are.
#
# ```python
# def to_experts(tokens, expert_of, group):
#     send = torch.bincount(expert_of, minlength=group.size())
#     take = torch.empty_like(send)
#     dist.all_to_all_single(take, send, group=group)
#     came = tokens.new_empty(int(take.sum()), tokens.shape[1])
#     by_expert = tokens[expert_of.argsort(stable=True)]
#     dist.all_to_all_single(came, by_expert, take.tolist(), send.tolist(), group=group)
#     return came
# ```
#
# </details>

# %% [markdown]
# ## Optional: how answers get back
#
# Now write the whole layer: out, through the expert, and back into the old order, with gradients. There are several good
# ways, so the checker looks only at what your function does.
#
# <details><summary>Hint</summary>
#
# An answer goes back the way that its token came. What becomes of the two lists of sizes? And which order undoes an
# `argsort`?
#
# </details>
#
# <details><summary>A hint for the gradients</summary>
#
# autograd records nothing of `dist.all_to_all_single`. You can write a `torch.autograd.Function` around it, or use
# `all_to_all_single_autograd` of `torch.distributed._functional_collectives`. In backward, which rank needs a row's
# gradient?
#
# </details>
#
# *Hard · 25 minutes · optional*

# %% tags=["stub", "hard"]
def expert_layer(tokens, expert_of, weights, expert, group):
    # weights: one for each token; expert(rows): the answers of this rank's expert, one for each row; the rest as above
    return ...  # in each token's row, the answer of its expert times its weight; backward reaches all three

# %%
layer.check(expert_layer)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The gradient of a row that travelled goes back to the rank that sent it. So the backward of an exchange is the same
# exchange with the two lists swapped, and so is the way back of the answers. That makes four all_to_alls of rows for each
# layer. (Muon's step sends nothing of an expert from one place along ep to another, because no expert has parts at two
# places.)
#
# ```python
# def expert_layer(tokens, expert_of, weights, expert, group):
#     class Exchange(torch.autograd.Function):
#         @staticmethod
#         def forward(ctx, rows, send, take):
#             ctx.sizes = take, send
#             came = rows.new_empty(sum(take), rows.shape[1])
#             dist.all_to_all_single(came, rows.contiguous(), take, send, group=group)
#             return came
#
#         @staticmethod
#         def backward(ctx, grad):
#             return Exchange.apply(grad, *ctx.sizes), None, None
#
#     send = torch.bincount(expert_of, minlength=group.size())
#     take = torch.empty_like(send)
#     dist.all_to_all_single(take, send, group=group)
#     send, take = send.tolist(), take.tolist()
#     order = expert_of.argsort(stable=True)
#     answers = expert(Exchange.apply(tokens[order], send, take))
#     return weights[:, None] * Exchange.apply(answers, take, send)[order.argsort()]
# ```
#
# </details>

# %% [markdown]
# Among so many ranks one is always broken, so the next lesson asks: which one, and which line?
#
# *Read on:* [Dion's issue 96](https://github.com/microsoft/dion/issues/96)
