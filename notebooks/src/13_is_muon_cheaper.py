# %% [markdown]
# # 13 · Is Muon cheaper than AdamW?
#
# A published report found that Muon communicates 0.57 times as much as AdamW, and the paper on distributed Muon (Liu
# et al., 2025) says up to 1.25 times. Both are honest, so what did each count?

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
from muon_tutorial.learn import cheaper as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Eighty minutes.** At the end you can say for which dtype, batch, link and strategy Muon is cheaper than AdamW,
# read a profiler's trace without counting anything twice, and tell waiting from transfer. A good place to stop is
# before *Waiting is not transfer*. When you come back, run all cells above it again.
#
# *You need* lesson 09 (routes, and `yield from travel`) and lesson 10 (bills, and the ledger).
#
# - *Previous:* [12 · Why does `step()` return before the work is done?](12_why_step_returns_early.ipynb)
# - *Next:* [14 · What changes when ranks go from 32 to 16,384?](14_from_32_to_16384_ranks.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 13` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* dp can be 2, 3, 4, 6 or 8; tp 1, 2 or 4.
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
import math
from torch.profiler import ProfilerActivity, profile
from muon_tutorial import launch
from muon_tutorial.engine.collective import Label
from muon_tutorial.engine.travel import travel
from muon_tutorial.learn import cheaper as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
_ = my_muon.so_far("13")

# %% [markdown]
# ## Cheaper in what?
#
# Each **waterfall** in the picture leads from AdamW's number to Muon's, one change at a time. Bytes, time and memory
# (lesson 10) disagree, so a claim of "cheaper" must say in which of them, and for which model, dtype, batch and link.
#
# <details><summary>Nothing ran: whose numbers?</summary>
#
# The **planner** walks a step with dp = 8, without data, and computes its time from a file that describes a machine.
#
# </details>
#
# ## Bytes
#
# Compare **like for like**: all bytes sent on the way from *raw* gradients, `g[B]{U_dp}`, to new weights on all
# ranks, `w[B]`. In between, `zero1` gathers x, the input of Newton–Schulz, in bfloat16. Under `layerwise` a matrix
# *lives* with one owner: its gradients are summed there, and its new weights go out to all. AdamW with ZeRO-1 sends in
# phases 1 and 7 only. Count what one rank sends on a ring. (Under `layerwise`, ranks that own more send more, so take
# the dp group's mean.)
#
# <details><summary>Hint</summary>
#
# In a reduce or a broadcast, every rank but one sends the whole tensor: on average (dp − 1) / dp of it.
#
# </details>
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def bytes_sent(entries, dp, item):
    # entries: how many the whole bucket has; item: bytes of one entry, be it of a gradient or of a weight
    return {"AdamW": ..., "zero1": ..., "layerwise": ...}

# %%
by_hand, adamw, once, headlines, waiting, turning = lesson.all_exercises(dp, tp, seed)
by_hand.check(bytes_sent)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# In each collective, a rank sends (dp − 1) / dp of the entries, with `layerwise` on average.
#
# ```python
# def bytes_sent(entries, dp, item):
#     sent = (dp - 1) * entries // dp
#     return {"AdamW": 2 * sent * item, "zero1": sent * (2 * item + 2), "layerwise": 2 * sent * item}
# ```
#
# </details>

# %% [markdown]
# Real ranks check your count. Write AdamW's step for them.
#
# <details><summary>Hint</summary>
#
# It is the step of lesson 09 without phases 2 to 6: `yield from travel`, arithmetic, `yield from travel`.
# `bucket.summands` counts the summed gradients: a sum is not a mean.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def adamw_step(gradients, weights, bucket, at):
    # gradients: your own, of the whole bucket; weights: your slice; bucket.summands: how many are summed
    # x = yield from travel(x, route, at, Label("a name"))
    # the route bucket.gradient sums gradients into slices; bucket.parameter makes slices of weights whole
    # fresh = lesson.adamw(weights, mean) does the arithmetic of a slice
    return ...  # all weights of the bucket

# %%
adamw.check(adamw_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The mean is taken after the sum, and only on this rank's slice. AdamW scales each entry by its usual size, so a sum
# in place of the mean hardly changes the weights, and only a test of the bits finds it.
#
# ```python
# def adamw_step(gradients, weights, bucket, at):
#     summed = yield from travel(gradients, bucket.gradient, at, Label("gradients"))
#     fresh = lesson.adamw(weights, summed / bucket.summands)
#     return (yield from travel(fresh, bucket.parameter, at, Label("weights")))
# ```
#
# </details>

# %% tags=["ranks"]
adamw_step = adamw.accepted_or(lesson.adamw_step)
counted = launch(lesson.count, dp * tp, args=(dp, tp, seed, adamw_step), backend=backend)
print(lesson.say_counted(counted, tp))

# %%
bytes_sent = by_hand.accepted_or(lesson.bytes_sent)
for name, dtype in lesson.DTYPES.items():
    print(name, bytes_sent(lesson.length_of(dp, tp), dp, dtype.itemsize))  # length_of: the bucket's entries

# %% [markdown]
# So the answer depends on the dtype (the paper's 1.25 is for fp32) and the library (Gloo runs a reduce_scatter as an
# all_reduce).
#
# <details><summary>What does the last row of each dtype add?</summary>
#
# `owner` (lesson 10) expects averaged gradients, so that row adds the all_reduce that averages them.
#
# </details>
#
# ## Time, as a profiler logs it
#
# The report's 0.57 is a ratio of *times*: in each run, it summed up all events whose names say all-reduce or
# all-gather. Profile your own step, and look at rank 0's events with such names, in microseconds:

# %% tags=["volatile", "ranks"]
def traced(rank):
    take = lesson.step_to_profile(dp, tp, seed, adamw_step)
    for _ in range(2):  # the first is a warm-up, of the profiler too
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            take()
    return lesson.collectives_in(seen.events())

mine = launch(traced, dp * tp, backend=backend, output="quiet")[0]
print(lesson.say_events(mine))

# %% [markdown]
# An event with `c10d::` in its name is the launch, which only hands the work to another thread. The event with the
# backend's name (`gloo:`) is that work. The table calls it a kernel, because on a GPU a kernel does it. There, a
# collective also gets an **annotation**, a label over a stretch of time, on the CPU and on the GPU. So each
# collective leaves four events, as in a step of the report's asynchronous run:

# %%
events = lesson.gpu_step()
print(lesson.say_events(event for event in events if event.communicates))

# %% [markdown]
# Only the kernel moves data. For how long did communication run, if each moment counts once?
#
# <details><summary>Hint</summary>
#
# Keep only kernels that communicate, in the order in which they begin. Up to which moment has time been counted when
# the next one begins?
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def communicating(events):
    # each event has .sort (such as "kernel"), .communicates, .begin and .duration (both in nanoseconds)
    # where kernels overlap, the time that they share counts once; a trace may have no kernel that communicates
    return ...  # nanoseconds, although the table shows microseconds

# %%
once.check(communicating)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Once kernels are in the order in which they begin, one pass is enough: `reached` says how far time has been counted.
# A kernel that lies inside an earlier one adds nothing.
#
# ```python
# def communicating(events):
#     kernels = [event for event in events if event.sort == "kernel" and event.communicates]
#     total = reached = 0
#     for event in sorted(kernels, key=lambda event: event.begin):
#         end = event.begin + event.duration
#         total += max(0, end - max(event.begin, reached))
#         reached = max(reached, end)
#     return total
# ```
#
# </details>

# %%
communicating = once.accepted_or(lesson.communicating)
by_name = sum(event.duration for event in events if event.communicates)
print(f"sum over events with such names: {by_name:,} ns; time in which communication ran: {communicating(events):,} ns")

# %% [markdown]
# And in your own step, where a collective leaves only two events?

# %% tags=["volatile"]
by_name = sum(event.duration for event in mine if event.communicates)
print(f"sum over events with such names: {by_name:,} ns; time in which communication ran: {communicating(mine):,} ns")

# %% [markdown]
# The report's own traces, in milliseconds over five steps:

# %%
runs = lesson.report()  # such as runs["muon_async"].launch.total
print(lesson.say_report())

# %% [markdown]
# Its headlines were 0.57 × the communication, 1.1 % overhead, and 2.1 × slower with asynchronous collectives.
# Which fields did it divide, and which should it have divided?
#
# <details><summary>Hint</summary>
#
# Of each run, `sum_over_names`, `kernels` and `gpu_span` are times. The parts `launch`, `optimizer` and `full_step`
# have theirs in `.total`. Every headline is one division.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
found = {
    "0.57": ...,  # Muon's communication over AdamW's, as the report found it: your division must give 0.57
    "0.57 once": ...,  # with each collective counted once
    "1.1%": ...,  # Muon's optimizer as a part of the step, as the report found it
    "1.1% on the GPU": ...,  # the kernels of the optimizer, as a part of the GPU's whole span
    "2.1": ...,  # how many times slower async looked
    "2.1 as a span": ...,  # the same ratio, of the time that passes on the GPU from its first event to its last
}

# %%
headlines.check(found)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `sum_over_names` adds up a collective's kernel and its annotation, so it counts it about twice, and `kernels` counts it
# once. The report's 1.1 % divides two times of the CPU, which only launches the optimizer's work. On the GPU's clock both
# parts of a ratio must be the GPU's, and a sum of kernels that wait side by side can be longer than the span.
#
# ```python
# adamw_run, muon, later = runs["adamw"], runs["muon"], runs["muon_async"]
# found = {
#     "0.57": muon.sum_over_names / adamw_run.sum_over_names,
#     "0.57 once": muon.kernels / adamw_run.kernels,
#     "1.1%": muon.launch.total / muon.full_step.total,
#     "1.1% on the GPU": muon.optimizer.total / muon.gpu_span,
#     "2.1": later.sum_over_names / muon.sum_over_names,
#     "2.1 as a span": later.gpu_span / muon.gpu_span,
# }
# ```
#
# </details>

# %%
for name, number in lesson.right_headlines().items():
    print(f"{name:16} {number:.3f}")

# %% [markdown]
# The 1.1 % is only the CPU's *call*. The kernels that it queues fill more than half of the GPU's span. 0.57 hardly
# changes, because both runs were counted about twice. But did both do the same work?

# %%
print(lesson.say_bytes())

# %% [markdown]
# No: AdamW's run averaged its gradients. Muon's was given averages, and never sent new weights.
#
# Async looked slower because a kernel that waits looks busy. But by its span it was *faster*. Here is one of its
# steps:

# %%
lesson.draw_gpu_step()

# %% [markdown]
# In the tp gather, rank 0 sends its half of a matrix, 8,388,608 entries. Its own slice has at most 4,662,860 of them,
# so the dp gather must bring the rest first. Does the tp gather wait for it? From the two kernels' times, compute how
# long before the dp gather's end the tp gather begins.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
along_dp, along_tp = (event for event in events if event.sort == "kernel" and event.communicates)
early = ...  # nanoseconds; an event has .begin, .duration and .end

# %%
lesson.early_exercise().check(early)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The tp gather sends entries that the dp gather brings, so it may begin only when that has ended. All time between its
# begin and that end is too early.
#
# ```python
# along_dp, along_tp = (event for event in events if event.sort == "kernel" and event.communicates)
# early = along_dp.end - along_tp.begin
# ```
#
# </details>

# %% [markdown]
# Newton–Schulz, too, began 19 ms before the dp gather's end. In all five steps a *wait* is missing (lesson 12), so
# nothing made sure that the entries came in time. That explains the gain: the run that waits spent 42.8 ms in dp
# gathers, and async's span is shorter by almost as much, 40.7 ms.
#
# <details><summary>An open task: write the report's author a correction (30 minutes)</summary>
#
# Without the author's own traces you could not have found any of this, so write as you would like to be corrected. One
# page is enough. `runs` also has `"adamw_async"`, which no headline used. There is more than one good answer. A good
# page
#
# 1. puts each headline beside the division that it should have been, with both results;
# 2. says which headline hardly changes, and why;
# 3. names what the two runs did not do alike, and says whether that headline still compares Muon with AdamW;
# 4. proposes the one measurement that would settle it, and says which result would prove you wrong.
#
# </details>
#
# <details><summary>A solution of the open task, in short</summary>
#
# 0.57 added up every event with such a name. Kernels alone give 0.59. 1.1 % is the CPU's call as a part of the CPU's
# step, but the optimizer's work is 61 % of the GPU's span. 2.1 × added up kernels that wait. From first event to last,
# async takes 0.90 times as long, but only because its tp gather does not wait for the dp gather. `adamw_async` waits for
# all but its last and shortest all_reduce. It takes 1.5 times as long by names, and 0.99 as a span.
#
# Only 0.57 hardly changes, because both of the times that it divides are about twice too long. But AdamW's run
# averaged the gradients and Muon's did not, so even 0.59 does not compare two optimizers. By bytes, and like for like,
# Muon sends 1.25 times what AdamW sends, or 1.70 with its tp gather.
#
# To settle it, run both with ZeRO-1, from raw gradients to new weights, with all ranks on one clock. Leave out the
# waiting, and compare how long the kernels that communicate then ran. If Muon's take less time than AdamW's, we were
# wrong, and the headline was right.
#
# </details>
#
# ## Waiting is not transfer
#
# A kernel keeps running until its peers arrive, so the only published trace, rank 0's, shows waiting as
# communication. With *all* ranks on one clock you can tell waiting from transfer. How long did each rank wait?
#
# <details><summary>Hint</summary>
#
# A rank that needs something from all others cannot finish before the last one has joined the call. When did the last
# rank ask? Each rank that asked earlier waited from its own request until that moment, unless it was done before.
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def waited(flights):
    # one collective as each of its ranks lived it: .rank, .issued (it asked) and .done, in nanoseconds
    # if a rank is done before the last one asks, it only had to send, and did not wait
    return ...  # {rank: nanoseconds it waited}

# %%
waiting.check(waited)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `last` needs the records of all ranks: no rank's own trace contains it.
#
# ```python
# def waited(flights):
#     last = max(flight.issued for flight in flights)
#     return {each.rank: last - each.issued if each.done >= last else 0 for each in flights}
# ```
#
# </details>

# %% [markdown]
# In this step, rank 0 owns by far the largest matrix:

# %% tags=["volatile", "ranks"]
waited = waiting.accepted_or(lesson.waited)
timeline = lesson.record_late(dp * tp, steps, seed, backend)
print(lesson.say_waits(timeline, waited))

# %% [markdown]
# Where a rank mostly waits, its own trace suggests that you need faster links. But the rank usually waits for rank 0,
# which has too much work.
#
# <details><summary>See your training in Perfetto, a viewer of traces</summary>
#
# `python scripts/trace_run.py --dp 2 --steps 3` trains a small GPT and records three steps on all ranks, on one clock.
# It prints what part of the time each rank spent computing, communicating and waiting, and writes
# `runs/trace/trace.json.gz`. Open that file at [ui.perfetto.dev](https://ui.perfetto.dev): each rank has its own lane,
# so you see who waits for whom.
#
# </details>
#
# ## Time of the whole step
#
# Forward and backward grow with the batch, but the optimizer's step does not (`boundary` is lesson 10's `zero1` that
# gathers only matrices that straddle a boundary):

# %%
print(lesson.say_steps())

# %% [markdown]
# To reach the same *loss*, AdamW takes 1.1 × as many steps. Even so, with the top picture's batch (131,072 tokens)
# AdamW gets there in less time.
#
# <details><summary>Where 1.1 × is from</summary>
#
# [Wen et al.](https://arxiv.org/abs/2509.02046) find it at this size. [Liu et al.](https://arxiv.org/abs/2502.16982)
# report about 2 ×.
#
# </details>
#
# If links are 64 times slower, with which strategy does Muon reach that loss before AdamW, with the same batch?
#
# <details><summary>Hint</summary>
#
# On slow links bytes decide, and two of the three send hardly more than AdamW. In which of these two do
# all ranks send at the same time?
#
# </details>
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
slow = ...  # "zero1", "boundary" or "layerwise"

# %% tags=["answer"]
compare({"slow": slow}, {"slow": lesson.slow_winner()})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# In one step `boundary` sends hardly more than AdamW, and Muon takes fewer steps. `zero1`
# gathers everything. `layerwise` sends no more than AdamW, but its matrices are unequal and travel to one owner after
# another, while other links are idle.
#
# ```python
# slow = "boundary"
# ```
#
# </details>

# %% [markdown]
# ## All strategies, side by side
#
# <details><summary>Three names, and what is counted</summary>
#
# `gram` is lesson 08's last optional exercise, `owner_per_replica` is lesson 11's HSDP, but with an owner in each
# replica, and `layerwise` has `tp="share"`: the tp ranks at a place divide the place's matrices among themselves.
# Where a strategy expects averaged gradients, their all_reduce is counted, too.
#
# </details>

# %%
print(lesson.say_strategies(dp=4, tp=2))

# %% [markdown]
# Of the strategies with a single rank at work on each matrix, which one sends the fewest bytes?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
taken = ...  # a name from the first column

# %% tags=["answer"]
compare({"taken": taken}, {"taken": lesson.least_work_and_bytes(dp=4, tp=2)})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# An owner gathers only its own matrices, so `layerwise` sends 92 MB where `zero1` sends 113, and it does the work
# once, not twice. `owner` does it once, too, but has to average all gradients first. `boundary` sends as little but
# does the work twice, and `gram` sends less, but all tp ranks work on each matrix, and its bits differ.
#
# ```python
# taken = "layerwise"
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Bytes, time and memory give different answers. By bytes and work, `layerwise` won. By time, on slow links (without
#   tp), `boundary` won, because an owner's matrices travel one after another.
# - Compare like for like: raw gradients in, new weights out.
# - Count each collective once, by its kernel.
# - Waiting looks like transfer until you have the clocks of all ranks.
# - Large batches and fewer steps pay for Newton–Schulz.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %%
quiz = lesson.quiz(counted, dp, tp)

# %% tags=["stub"]
answers = {
    "bf16": ...,  # zero1's bytes over AdamW's on a ring, all bf16
    "gloo": ...,  # layerwise's bytes over AdamW's on Gloo, fp32
    "Newton–Schulz": ...,  # its part of a step's time: .product / .seconds of lesson.muon_step("all fp32", "layerwise")
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# On a ring, AdamW's gradients and weights take 2 bytes an entry each, and `zero1` adds x, with 2 more. On Gloo AdamW's
# reduce_scatter is an all_reduce, which sends twice as much, so AdamW sends 2 + 1 parts where `layerwise`, with a reduce
# and a broadcast, sends 1 + 1. The third depends on machine and model, so only the planner can say it.
#
# ```python
# step = lesson.muon_step("all fp32", "layerwise")
# ring, gloo = (2 + 2 + 2) / (2 + 2), (1 + 1) / (2 + 1)
# answers = {"bf16": ring, "gloo": gloo, "Newton–Schulz": step.product / step.seconds}
# ```
#
# </details>

# %% [markdown]
# ## Where it turns
#
# Forward and backward take `forward` seconds a token. At how many tokens a step does Muon begin to reach the same
# loss sooner?
#
# <details><summary>Hint</summary>
#
# With t tokens a step, how long does Muon take for one step, and AdamW for `times` steps? For which t are both equal?
# Then ask what your formula says if AdamW's step is slow, and if `times` is 1.
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def break_even(forward, adamw, muon, times):
    # adamw, muon: seconds of one optimizer's step, without forward and backward
    # times: AdamW's steps for each step of Muon, at least 1
    return ...  # tokens; 0 if Muon leads with any batch, math.inf if with none

# %%
turning.check(break_even)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# One step of Muon takes `owed` seconds longer than `times` steps of AdamW. But for each step of Muon, AdamW also runs
# `times - 1` more forwards and backwards, which cost `saved` seconds for each token.
#
# ```python
# def break_even(forward, adamw, muon, times):
#     owed = muon - times * adamw
#     saved = (times - 1) * forward  # with each token
#     if owed <= 0:
#         return 0
#     return owed / saved if saved else math.inf
# ```
#
# </details>

# %%
print(lesson.say_turns(turning.accepted_or(lesson.break_even)))

# %% [markdown]
# <details><summary>What does this table say about links?</summary>
#
# With `zero1`, Muon needs larger batches to lead on slow links than on fast ones. With `boundary` it is the other way
# round, because each of its steps sends hardly more than AdamW's, and AdamW takes more steps.
#
# </details>
#
# In which settings does Muon lead if both take equally many steps?

# %%
lesson.explore_costs(live=widgets)  # choose "as many", or ask your break_even

# %% [markdown]
# <details><summary>Compare</summary>
#
# In none: step for step, AdamW is always faster here. If AdamW takes twice as many steps, Muon leads in all.
#
# </details>

# %% [markdown]
# The next lesson asks what changes with thousands of ranks.
#
# *Read on:* [Fantastic Pretraining Optimizers](https://arxiv.org/abs/2509.02046)
