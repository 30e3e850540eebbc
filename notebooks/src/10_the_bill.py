# %% [markdown]
# # 10 · The bill: what does a step cost?
#
# In one Muon step of Llama 3.1 70B, each of 512 GPUs may send 70 GB. Before anything runs: how many bytes does a rank
# send in each phase, and how many does it keep?

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
from muon_tutorial.learn import bill as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty-five minutes.** At the end you can write the bill of a step by hand, for any matrices on any grid: the bytes
# of each phase, how many ranks orthogonalize a matrix, and the state beside AdamW's. You will have checked it against
# the bytes that real ranks counted.
#
# *You need* lesson 05 (buckets and slices) and lesson 09 (the seven phases).
#
# *The 70 GB* are what a rank sends with `zero1`, according to
# `python -m muon_tutorial plan llama-3.1-70b --grid dp=64,tp=8`.
#
# - *Previous:* [09 · The mirror: how does every matrix find its way back?](09_the_mirror.ipynb)
# - *Next:* [11 · How do I plug in my own sharding?](11_my_own_sharding.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 10` makes. Colab
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
from muon_tutorial import launch
from muon_tutorial.learn import bill as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
_ = my_muon.so_far("10")

# %% [markdown]
# ## Who does the work?
#
# The picture shows lesson 09's matrices and where dp cuts them (its lower part is for *Fetch only what straddles*):

# %%
lesson.draw_boundary(dp, tp)

# %% [markdown]
# How many ranks run Newton–Schulz on o, under each strategy?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
replicated = ...  # every rank works on every matrix
round_robin = ...  # the ranks at place i % dp along dp work on matrix i (lesson 04); o is matrix 1
zero1 = ...  # a rank works on every matrix that its slice has a part of
owner = ...  # one rank of the whole grid works on it; its tp neighbours own other matrices

# %%
working, by_hand, fetching, quiz = lesson.all_exercises(dp, tp)
working.check(replicated, round_robin, zero1, owner)

# %% tags=["answer"]
plans = lesson.plans_of(dp, tp)
runs = {"replicated": replicated, "round_robin": round_robin, "zero1": zero1, "owner": owner}
compare(runs, lesson.runs_of(plans, "o"))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Under `zero1`, tp ranks work for each slice with a part of o.
#
# ```python
# replicated = dp * tp
# round_robin = tp
# zero1 = lesson.runs_of(lesson.plans_of(dp, tp), "o")["zero1"]
# owner = 1
# ```
#
# </details>

# %% [markdown]
# ## A bill by hand
#
# On a ring of P ranks, each rank sends P − 1 messages in a reduce_scatter or an all_gather, each as large as one
# rank's share. How many bytes does a rank send in each phase of `zero1`?
#
# <details><summary>Hint</summary>
#
# Try a bucket of 12 entries on dp=3. How many messages does a rank send in the reduce_scatter, how many entries has each,
# and how many bytes is that? Then along tp: for which matrices does a rank need its neighbours' pieces?
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def bill(total, touched, dp, tp):
    # total: entries of a rank's whole bucket, with its padding, before dp cuts it
    # touched: entries of this rank's tp pieces, counting only the matrices that it works on
    # gradients and weights are fp32, 4 bytes an entry; what goes to Newton–Schulz is bfloat16, 2 bytes
    return {
        "gradient reduce_scatter": ...,  # g[B]{U_dp} → g[B_dp]
        "dp gather": ...,  # x[B_dp] → x[B]
        "tp gather": ...,  # X[I, J_tp] → X[I, J], for each matrix that the rank works on
        "parameter all_gather": ...,  # w[B_dp] → w[B]
    }

# %%
by_hand.check(bill)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The first and the last line are equal, and the second is half of that because of bfloat16. Only the tp gather
# depends on which matrices a rank works on, so only this line can differ from rank to rank.
#
# ```python
# def bill(total, touched, dp, tp):
#     mine = total // dp
#     return {
#         "gradient reduce_scatter": 4 * (dp - 1) * mine,
#         "dp gather": 2 * (dp - 1) * mine,
#         "tp gather": 2 * (tp - 1) * touched,
#         "parameter all_gather": 4 * (dp - 1) * mine,
#     }
# ```
#
# </details>

# %% [markdown]
# <details><summary>The same for a large matrix</summary>
#
# Take one matrix of 1024 × 4096, with dp = 4 and tp = 2. A tp piece has 2,097,152 entries, and a slice is a quarter
# of that, 524,288. Phase 1 sends 4 · 3 · 524,288 bytes, about 6.3 MB. Phase 2 sends half of that, because its entries
# are bfloat16, and phase 7 sends as much as phase 1. Phase 3 sends 2 · 1 · 2,097,152 bytes, about 4.2 MB. Every slice
# has a part of the matrix, so all ranks run Newton–Schulz on it.
#
# </details>
#
# Some strategies below expect averaged gradients, so their bars include the all_reduce that averages them. (The next
# section explains `zero1, boundary`.)

# %%
lesson.draw_small_bills(dp, tp)

# %% [markdown]
# Without tp, `zero1` adds only the dp gather to the bill of AdamW with ZeRO-1, so it sends (4 + 2 + 4) / (4 + 4) = 1.25
# times as much (Liu et al., 2025). Bytes kept are on the bill, too: an optimizer's *state* is what it remembers from
# step to step, two moments an entry for AdamW, one for Muon. ZeRO-1 divides the state of both optimizers by dp.
#
# ## Fetch only what straddles
#
# Wei's script gathers the *whole* bucket. But a matrix that straddles no boundary lies in one slice already, so
# `gather="boundary"` moves only those that straddle one. Your slice has some entries of a matrix, or none. How many
# of them do you send to each place along dp?
#
# <details><summary>Hint</summary>
#
# First find out how many entries of the matrix each place holds, with the intersection of lesson 05. A place that
# holds none needs nothing, and you do not send to yourself.
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def sends(matrix, length, place, dp):
    # matrix: its range in the bucket, (start, stop); length: of each slice; place: yours
    return ...  # a list of dp counts

# %%
fetching.check(sends)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Each receiver gets the same entries, those that *you* hold, so the count is `held[place]`. `held[p]` only decides
# whether place p needs them.
#
# ```python
# def sends(matrix, length, place, dp):
#     held = [max(0, min(matrix[1], (p + 1) * length) - max(matrix[0], p * length)) for p in range(dp)]
#     return [held[place] if held[p] and p != place else 0 for p in range(dp)]
# ```
#
# </details>

# %% [markdown]
# Real ranks send as many entries as you say, in one `all_to_all_single` (each rank may send every other a different
# number):

# %%
sends = fetching.accepted_or(lesson.sends)

def fetch(rank):
    return lesson.fetch_shared(rank, dp, tp, seed, sends)

print(lesson.say_fetched(launch(fetch, dp * tp, backend=backend)))

# %% [markdown]
# ## Play with the bill
#
# When does Muon send nearly as few bytes as AdamW, and when do many ranks repeat Newton–Schulz?

# %%
lesson.explore_bills(live=widgets)

# %% [markdown]
# <details><summary>Answers</summary>
#
# Without tp and with `gather="boundary"`, Muon sends hardly more bytes than AdamW, because few matrices straddle. In
# this model a matrix has parts at one place along dp, or at two. All tp ranks of such a place run Newton–Schulz on it:
# tp ranks, or 2 · tp. The size of a bucket hardly matters, because dp cuts one list of all matrices (lesson 05).
#
# </details>

# %% [markdown]
# ## The phase that rounds
#
# For the same gradient, every strategy here gives the bits of one process. But phase 1 *adds*, each addition rounds,
# and another grid adds in another order, so last bits may differ. Newton–Schulz rounds its input to bfloat16. If such
# a last bit makes one entry of o's gradient round the other way, how many weights change?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
followed = ...  # "none", "one" or "hundreds"

# %% tags=["answer", "volatile"]
nudge = lesson.nudge(seed, texts=2)
print(nudge)
compare({"followed": followed}, {"followed": nudge.size})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Newton–Schulz multiplies the matrix by itself, so every entry of the update depends on every entry of the input.
#
# ```python
# followed = "hundreds"
# ```
#
# </details>

# %% [markdown]
# But this is rare, because bfloat16 keeps only 8 significant bits, so most fp32 sums round alike in any order:

# %% tags=["volatile"]
print(lesson.say_orders(seed, texts=8))

# %% [markdown]
# So two grids may agree for a while and then differ without a bug.
#
# <details><summary>Still fewer bits: fp8</summary>
#
# In fp8 an entry has 1 byte, so the dp gather and the tp gather would cost half as much. Two formats share the 8 bits
# differently. E4M3 keeps 4 significant bits. E5M2 keeps only 3 but has a wider range, which suits gradients
# ([Micikevicius et al., 2022](https://arxiv.org/abs/2209.05433)). With so few bits, a single scale for a whole matrix
# is too coarse, so DeepSeek-V3 took E4M3 and a scale for each block of 128 × 128 weights ([section
# 3.3](https://arxiv.org/abs/2412.19437)).
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - The bill of a phase is bytes an entry × entries of a share × (ranks − 1).
# - Under `zero1`, Muon adds the dp gather and the tp gather to the bill of ZeRO-1 AdamW.
# - Under `zero1`, every rank that keeps a part of a matrix orthogonalizes all of it, so a boundary inside it costs
#   bytes and work.
# - The same gradient gives the same bits. The sum that makes the gradient may not.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "saved": ...,  # how many of rank 0's bytes does the boundary gather save?
    "state": ...,  # how many bytes of state, in fp32, does rank 0 keep under zero1?
    "runs": ...,  # how many ranks run Newton–Schulz on up, under zero1?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# At the default parameters, a rank's bucket has 2,048 entries of up, 512 of o and 2,048 of down, and a slice is half of
# that, 2,304. So rank 0 keeps up and half of o. Of the two only o straddles, which saves sending up: 2,048 entries of
# 2 bytes. The state is 2,304 momenta of 4 bytes. All of up lies in one slice, so only that place's tp ranks work on it.
#
# ```python
# bills = {name: lesson.bill_of(name, plan) for name, plan in plans.items()}
# saved = bills["zero1"].total - bills["zero1, boundary"].total
# on_up = lesson.runs_of(plans, "up")["zero1"]
# answers = {"saved": saved, "state": bills["zero1"].state, "runs": on_up}
# ```
#
# </details>

# %% [markdown]
# ## Does the ledger agree?

# %%
bill = by_hand.accepted_or(lesson.bill)
at = plans["zero1"].grid.at(0)
yours = bill(lesson.entries_of_rank(plans["zero1"]), lesson.touched_entries(plans["zero1"], at), dp, tp)
print(yours)

# %% [markdown]
# Real ranks take a step with each strategy, and a **ledger** notes the bytes of each request. Rank 0 sent:

# %%
counted = launch(lesson.count, dp * tp, args=(dp, tp, seed), backend=backend)
print(lesson.say_counted(counted))
print("as in your bill:", {phase: counted[0]["zero1"].sent.get(phase, 0) == sent for phase, sent in yours.items()})

# %% [markdown]
# Which strategies keep half as much state as ZeRO-1 AdamW?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
halves = ...  # a list of names, each as it stands in the first column of the table above

# %% tags=["answer"]
adamw = lesson.adamw_bill(plans["zero1"]).state
found = [name for name, of_rank_0 in counted[0].items() if 2 * of_rank_0.state == adamw]
kept = {f"bytes of {name}": of_rank_0.state for name, of_rank_0 in counted[0].items()}
compare({"halves": halves}, {"halves": found, **kept, "bytes of ZeRO-1's AdamW": adamw})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `zero1` divides one moment by dp, where ZeRO-1's AdamW divides two. With the other strategies, a rank keeps momentum
# for all weights that it holds.
#
# ```python
# halves = ["zero1", "zero1, boundary"]
# ```
#
# </details>

# %% [markdown]
# Your bill holds for cuts that this package knows, and the next lesson asks how you plug in your own.
#
# *Read on:* [Sharded matrices](https://jax-ml.github.io/scaling-book/sharding)
