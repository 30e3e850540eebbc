# %% [markdown]
# # 13 · Is Muon cheaper than AdamW?
#
# A published report measured 0.57 times AdamW's communication; Muon's own paper allows 1.25 times. Both added up honest
# numbers: so what did each of them count, and which one is your bill?

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
from muon_tutorial.learn import cheaper as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty-five minutes.** The hard exercise takes twenty more. At the end you can say for which dtype, batch, link and
# strategy Muon is cheaper than AdamW, read a profiler's trace without counting anything twice, and tell waiting from
# transfer.
#
# *You need* lesson 09 (routes, and `yield from travel`) and lesson 10 (bills, and the ledger).
#
# - *Previous:* [11 · How do I plug in my own sharding?](11_my_own_sharding.ipynb)
# - *Next:* [15 · It hangs, or lies. Which rank, which line?](15_it_hangs_or_lies.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 13` makes. It has
#   nothing to install.
#
# *Other grids:* dp and tp of 1, 2 or 4; dp may be 3, 6 or 8, too.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
from muon_tutorial import launch
from muon_tutorial.engine.collective import Label
from muon_tutorial.engine.travel import travel
from muon_tutorial.learn import cheaper as lesson
from muon_tutorial.learn.widgets.reveal import compare

# %% [markdown]
# ## Three bills, three answers
#
# This **waterfall** leads from AdamW's number to Muon's, one change at a time: more bytes, more time, less memory.
# Nothing ran for it. Now three questions. What did you count? How? And is it the same work?
#
# ## First bill: bytes
#
# Same work means: both begin with each rank's *raw* gradient, and end with new weights on all ranks. That is
# **like for like**. How many bytes do the ranks of one dp group send *together*, along dp, on rings?
#
# `zero1` gathers all of its momentum, in bfloat16. `layerwise` is new: a matrix *lives* with one owner. Its gradient is
# summed there, its momentum never moves, and its new weights go out to all.
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def bytes_sent(entries, dp, item):
    # entries: of the whole bucket; item: bytes of an entry of gradients, and of weights
    return {"AdamW": ..., "zero1": ..., "layerwise": ...}

# %%
by_hand, adamw, once, headlines, waiting, turning = lesson.all_exercises(dp, tp, seed)
by_hand.check(bytes_sent)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Each rank sends its share to dp − 1 others: (dp − 1) · entries, all ranks together, for each collective.
#
# ```python
# def bytes_sent(entries, dp, item):
#     once = (dp - 1) * entries
#     return {"AdamW": 2 * once * item, "zero1": once * (2 * item + 2), "layerwise": 2 * once * item}
# ```
#
# </details>

# %% [markdown]
# Now let real ranks count. Muon's steps are the package's; AdamW's moves are yours. `bucket.gradient` is the route on
# which gradients are summed, and ends in your slice. `bucket.parameter` leads from a slice of weights to all of them.
# `lesson.adamw` is AdamW's arithmetic, element by element. Beware: is a sum a mean?
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def adamw_step(gradients, weights, bucket, at):
    # gradients: your own, of the whole bucket; weights: your slice
    # x = yield from travel(x, route, at, Label("a name")); bucket.summands: how many ranks are summed
    fresh = lesson.adamw(weights, ...)
    return ...

# %%
adamw.check(adamw_step)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
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

# %% [markdown]
# And by hand:

# %%
bytes_sent = by_hand.accepted_or(lesson.bytes_sent)
for name, dtype in lesson.DTYPES.items():
    print(name, bytes_sent(lesson.length_of(dp, tp), dp, dtype.itemsize))

# %% [markdown]
# One step, and look how many answers! Three things turn them round:
#
# - *dtype:* the momentum's 2 bytes weigh more where all else has 2, too.
# - *ring or Gloo:* Gloo runs a reduce_scatter as a whole all_reduce. On Gloo, `layerwise` even beats AdamW.
# - *raw or averaged gradients:* `owner` looks cheapest by far in fp32. But it expects gradients that are averaged
#   already, and somebody has paid for that. It is not the same work.
#
# ## Second bill: time, as a profiler logs it
#
# The report's 0.57 is no number of bytes. It is *time*: the durations of all events whose names contain `all_reduce` or
# `all_gather`. A little trace, made up in the form of theirs (microseconds; a kernel is what the GPU runs):

# %%
events = lesson.made_up_trace()
print(lesson.say_events(events))

# %% [markdown]
# How many of these events are a collective at work?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
working = ...

# %% tags=["answer"]
compare({"working": working}, {"working": len(lesson.at_work(events))})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The CPU launches it, and both sides get an **annotation**: a label over a stretch of time. Only the kernel works.
#
# ```python
# working = 1
# ```
#
# </details>

# %% [markdown]
# One collective, logged as four events. Write the honest sum: nanoseconds in which communication ran, each moment once.
# An event has `sort`, `name`, `begin`, `duration` and `communicates`. `lesson.covered(events)` are the intervals that
# any of them covers, `lesson.measure(…)` their length.
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def communicating(events):
    return ...

# %%
once.check(communicating)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def communicating(events):
#     kernels = [event for event in events if event.sort == "kernel" and event.communicates]
#     return lesson.measure(lesson.covered(kernels))
# ```
#
# </details>

# %%
communicating = once.accepted_or(lesson.communicating)
by_name = sum(event.duration for event in events if event.communicates)
print(f"by name {by_name:,} ns, at work {communicating(events):,} ns")

# %% [markdown]
# Now the real ones. The report published its traces, which few do; that is why anybody can check. Here is what was read
# from them, in milliseconds over five steps:

# %%
print(lesson.say_report())

# %% [markdown]
# Re-derive three headlines: 0.57 × the communication, 1.1 % overhead, and async 2.1 × slower. Beside each, put what you
# get if you count every collective once, look at the GPU, and take the span from start to end.
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
runs = lesson.report()  # such as runs["muon_async"].launch.total
found = {
    "0.57": ...,  # Muon over AdamW, by names
    "0.57 once": ...,  # the same, kernels alone
    "1.1%": ...,  # Muon: its launch, of the full step, both on the CPU
    "1.1% on the GPU": ...,  # Muon: the optimizer on the GPU, of the GPU's span
    "2.1": ...,  # muon_async over muon, by names
    "2.1 as a span": ...,  # the same, by the GPU's span
}

# %%
headlines.check(found)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
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
# Each headline is reproducible, and each says something else than it seems to. 1.1 % is how long the CPU takes to *launch*
# the optimizer; the GPU works on it for more than half of its span, beside a toy model. And async was 10 % *faster*, in
# one run: its kernels only spent longer waiting. (At 0.57, both runs are counted about four times, so the ratio barely
# moves. But is it the same work?) The bytes:

# %%
print(lesson.say_bytes())

# %% [markdown]
# AdamW there was plain DDP, and averaged its gradients. Muon's run was handed averaged ones, and ended before anybody had
# new weights.
#
# ## Waiting is not transfer
#
# A communication kernel spins until its peers arrive. So one rank's trace shows waiting as communication, and the report's
# traces are all rank 0's. With *all* ranks on one clock you can tell: nothing moves before the last member has asked.
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def waited(flights):
    # one collective as each of its ranks lived it: .rank, .issued (it asked) and .done, in nanoseconds
    # a rank that is done before the last one asks has only sent: it waited for nobody
    return ...  # {rank: nanoseconds it waited}

# %%
waiting.check(waited)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def waited(flights):
#     last = max(flight.issued for flight in flights)
#     return {each.rank: last - each.issued if each.done >= last else 0 for each in flights}
# ```
#
# </details>

# %% [markdown]
# Try it on your machine. In this step of `round_robin`, rank 0 owns by far the largest matrix, and all ranks are
# recorded:

# %% tags=["volatile", "ranks"]
waited = waiting.accepted_or(lesson.waited)
timeline = lesson.record_late(dp * tp, seed, backend)
print(lesson.say_waits(timeline, waited))

# %% tags=["volatile"]
lesson.draw_waits(timeline)

# %% [markdown]
# From its own trace, each late-night reader of rank 1 would buy faster links. The cure is a better balance.
#
# ## Third bill: the whole step
#
# Back to the waterfall. Forward and backward grow with the batch; the optimizer's step does not:

# %%
print(lesson.say_forward())

# %% [markdown]
# And to the same *loss*? Muon takes fewer steps: AdamW needs 1.1 × as many, say
# [Wen et al.](https://arxiv.org/abs/2509.02046) at this size; about 2 ×, say
# [Liu et al.](https://arxiv.org/abs/2502.16982). Take the cautious 1.1, at the hero's batch. AdamW is then ahead with every
# strategy. Now links get 64 times slower. With which strategy does Muon overtake: `"zero1"`, `"boundary"` (`zero1` that
# gathers only what straddles) or `"layerwise"`?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
slow = ...

# %% tags=["answer"]
compare({"slow": slow}, {"slow": lesson.slow_winner()})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# On slow links the bytes decide. `boundary` sends hardly more than AdamW in a step, and takes fewer steps.
# `layerwise` sends no more, but its slices are unequal: they go to one owner after the other, while some links idle.
#
# ```python
# slow = "boundary"
# ```
#
# </details>

# %% [markdown]
# ## Play with it
#
# Press play: the batch grows, and the winner turns round. Then slow the links down, and change strategy and dtypes. Can
# you make Muon lose at the largest batch?

# %%
lesson.explore_costs(live=widgets)

# %% [markdown]
# ## Find the break-even
#
# Somewhere along the bandwidth, the answer turns: the **break-even**. `lead(bandwidth)` asks the planner by how many
# seconds Muon is ahead (below zero: AdamW), where bandwidth is a part of the file's. Find where it changes sign, to one
# per cent, between `slowest` and `fastest`. Give None where it never does.
#
# *Hard · 20 minutes · optional · par 2 calls*

# %% tags=["stub", "hard"]
def break_even(lead, slowest, fastest):
    return ...

# %%
turning.check(break_even)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A bisection takes about twenty calls. But seconds are bytes / bandwidth and a rest that no link shortens. In
# 1 / bandwidth, that is a straight line: two points give it away.
#
# ```python
# def break_even(lead, slowest, fastest):
#     slow, fast = lead(slowest), lead(fastest)
#     if (slow > 0) == (fast > 0):
#         return None
#     slope = (slow - fast) / (1 / slowest - 1 / fastest)
#     return slope / (slope / fastest - fast)
# ```
#
# </details>

# %%
break_even = turning.accepted_or(lesson.break_even)
print(lesson.say_break_evens(break_even))

# %% [markdown]
# Both signs! Slow links help Muon where it sends few bytes, and AdamW where Muon gathers everything. Step for step, with
# no credit for fewer steps, AdamW is ahead everywhere in this table.
#
# ## Recap
#
# - Cheaper in what? Bytes, time and memory answer differently.
# - Compare like for like: raw gradients in, new weights out.
# - Count each collective once, by its kernel. Names, launches and annotations repeat it.
# - Waiting looks like transfer, until you have all ranks' clocks.
# - Newton–Schulz costs the same at any batch. Large batches and fewer steps pay for it; a full gather over slow links
#   does not.
#
# **Quiz.** One line measures each.
#
# *Easy · 3 minutes · required*

# %%
quiz = lesson.quiz(counted, dp, tp)

# %% tags=["stub"]
answers = {
    "bf16": ...,  # zero1's bytes over AdamW's on a ring, all bf16
    "gloo": ...,  # layerwise's bytes over AdamW's on Gloo, fp32
    "Newton–Schulz": ...,  # the hero's model under layerwise, all fp32: milliseconds a step
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# sums = lesson.together(counted, tp)
# ring = sums["bf16"]["zero1"].ring / sums["bf16"][lesson.ADAMW].ring
# gloo = sums["fp32"]["layerwise"].gloo / sums["fp32"][lesson.ADAMW].gloo
# milliseconds = lesson.muon_step("all fp32", "layerwise").product * 1e3
# answers = {"bf16": ring, "gloo": gloo, "Newton–Schulz": milliseconds}
# ```
#
# </details>
