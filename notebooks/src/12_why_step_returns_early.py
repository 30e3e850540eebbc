# %% [markdown]
# # 12 · Why does `step()` return before the work is done?
#
# You ask for an all_reduce, and the call is back at once. Where is the result, and what may your program do until it
# is there?

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
from muon_tutorial.learn import early_return as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Seventy minutes.** The optional exercises take eighteen more. At the end you can read a timeline, say how long a
# schedule takes before it runs, write the loop that hides communication behind work, and find a wait that is missing in
# another loop. In the optional part, the last two sections, you order the work of a pipeline and trade a stage's memory
# for work. A good place to stop is before *Find the missing wait*. When you come back, run all cells above it again.
#
# *You need* lesson 03 (collectives) and lesson 09 (ranks as generators).
#
# - *Previous:* [11 · How do I plug in my own sharding?](11_my_own_sharding.ipynb)
# - *Next:* [13 · Is Muon cheaper than AdamW?](13_is_muon_cheaper.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 12` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* any dp and tp that are not both 1.
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
import time
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.engine.collective import Start, Wait
from muon_tutorial.learn import early_return as lesson, my_muon
from muon_tutorial.learn.widgets.reveal import compare
clocks, ahead, find, in_turn, again, quiz, recorded = lesson.all_exercises(dp * tp, seed)
_ = my_muon.so_far("12")

# %% [markdown]
# ## The call returns, the work does not
#
# A stopwatch around an all_reduce of sixteen megabytes:

# %% tags=["ranks", "volatile"]
def stopwatch(rank):
    tensor = torch.ones(4_000_000)
    dist.all_reduce(tensor)  # a warm-up: the first messages are slow
    dist.barrier()  # all wait here for the last
    begin = time.perf_counter()
    handle = dist.all_reduce(tensor, async_op=True)
    called = time.perf_counter()
    handle.wait()
    return called - begin, time.perf_counter() - called

print(lesson.say_stopwatch(launch(stopwatch, dp * tp, backend=backend)))

# %% [markdown]
# The call is **asynchronous**: it hands the tensor to another thread and returns. Until `handle.wait()` returns,
# neither read nor write the tensor. On a GPU every operation works like that, and only reading a result (`.item()`)
# waits for it. So `step()` returns as soon as its kernels (GPU programs) are launched.
#
# <details><summary>Three traps with a stopwatch on a GPU</summary>
#
# Without `torch.cuda.synchronize()` your watch times the launch. With NCCL, which is Gloo's
# counterpart on GPUs, `handle.wait()` is a launch, too: it makes the GPU's current queue (its *stream*) wait, and
# returns to the CPU at once. And a kernel that waits for other ranks spins, so waiting
# looks busy.
#
# </details>
#
# In the lower half of the top picture one bucket travels while another is computed: that is **overlap**.
# Communication for which a rank waits is **exposed** (hatched).
#
# <details><summary>Why each number stands there three times</summary>
#
# Each bucket of this `zero1` step travels three times under its number, as reduce_scatter, dp gather and all_gather.
#
# </details>
#
# ## How long does a schedule take?
#
# A rank is again a generator: `yield Start(…)` starts a collective and returns a **ticket**, like `handle`, and
# `yield Wait(…)` waits for the answer.

# %%
def one_by_one(count, gather, work, window=1):
    for i in range(count):
        ticket = yield Start(gather(i))  # ask for matrix i, and go on
        whole = yield Wait(ticket)  # go on when it is there
        work(i, whole)  # Newton–Schulz

quick = lesson.LoopTimes.alike(4, gather=2, work=3)  # milliseconds of each

# %% [markdown]
# Each matrix asked for and not yet done costs memory, so a **window** limits their number. A window of 1 is the loop
# above. With 2, the next matrix travels while you work on this one. The link carries one gather at a time. After how
# many milliseconds is all work done?
#
# <details><summary>Hint</summary>
#
# Keep two clocks, the link's and the rank's. A gather begins when the link is free and matrix i − window is done. Work
# begins when the rank is free and its matrix is there.
#
# </details>
#
# *Medium · 10 minutes · required*

# %% tags=["stub"]
def makespan(gathers, works, window):
    # milliseconds of each matrix's gather and work; a rank asks for as many as the window allows
    return ...

# %%
clocks.check(makespan)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# There are two clocks: the link waits for the window, and the rank waits for its matrix. With a window of 1 each
# clock waits for the other, and all times add up.
#
# ```python
# def makespan(gathers, works, window):
#     link, rank, done = 0, 0, []
#     for i, (gather, work) in enumerate(zip(gathers, works)):
#         asked = done[i - window] if i >= window else 0
#         link = max(link, asked) + gather
#         rank = max(rank, link) + work
#         done.append(rank)
#     return rank
# ```
#
# </details>

# %%
lesson.draw_schedules(dp * tp)

# %% [markdown]
# ## Write the loop that asks ahead
#
# Asking early is called **prefetch**. Write it as a generator.
#
# <details><summary>Hint</summary>
#
# Before you wait for matrix i, you must have asked for `min(i + window, count)` matrices. Keep the tickets in a list,
# and take each out of it when you wait.
#
# </details>
#
# *Medium · 12 minutes · required*

# %% tags=["stub"]
def prefetch(count, gather, work, window):
    # as one_by_one, but before you wait for matrix i, all up to i + window - 1 have been asked for
    # a ticket keeps its matrix in memory, so drop it (pop) once you have waited for it
    return ...

# %%
ahead.check(prefetch)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The `pop` matters, because a ticket that you keep also keeps its matrix. So the check counts them.
#
# ```python
# def prefetch(count, gather, work, window):
#     tickets, asked = [], 0
#     for i in range(count):
#         while asked < min(count, i + window):
#             tickets.append((yield Start(gather(asked))))
#             asked += 1
#         whole = yield Wait(tickets.pop(0))
#         work(i, whole)
# ```
#
# </details>

# %% [markdown]
# The **timed world**, in which ranks are generators with clocks, times your loop:

# %%
prefetch = ahead.accepted_or(lesson.prefetch)
for window in (1, 2, 4):
    timed = lesson.time_loop(prefetch, quick, window, dp * tp)
    print(f"window {window}: {timed.milliseconds:g} ms, holds {timed.watch.held}")

# %% [markdown]
# Only real ranks and matrices show whether the loop is *right*:

# %% tags=["ranks", "volatile"]
run = lesson.run_loop(prefetch, dp * tp, seed, window=2, backend=backend)
print(run)
lesson.draw_run(run.timeline, "Your loop on this machine, window 2")

# %% [markdown]
# ## Play with the window
#
# On which link does overlap save the largest part of a step?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
# compare work and sending in the top picture
# on the loopback, messages stay in the machine, so the same core computes and sends
best_link = ...  # "20 Mbit/s", "200 Mbit/s", "1 Gbit/s" or "loopback"

# %% tags=["answer"]
saved = {}  # on each link, with lesson.MOST, the largest window that is tried, in place of 1
for each in lesson.LINKS:
    one, most = (lesson.predict(each, size).milliseconds for size in (1, lesson.MOST))
    saved[each] = 1 - most / one
shown = {f"saved on {each}": f"{part:.0%}" for each, part in saved.items()}
compare({"best_link": best_link}, {"best_link": max(saved, key=saved.get), **shown})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Only the shorter of work and sending can be hidden behind the longer, so overlap saves most where the two differ
# least. On 20 Mbit/s sending takes six times as long as the work, and on 1 Gbit/s a seventh of it. On the loopback one
# core does both, so hardly anything can be hidden.
#
# ```python
# best_link = "200 Mbit/s"
# ```
#
# </details>

# %% [markdown]
# On 200 Mbit/s, what is the smallest window that no larger one beats?
#
# *Easy · 2 minutes · required*

# %%
lesson.explore_windows(live=widgets)

# %% tags=["stub", "predict"]
enough = ...  # play with the picture, or guess

# %% tags=["answer"]
tried = {window: lesson.predict("200 Mbit/s", window) for window in range(1, lesson.MOST + 1)}
fastest = min(tried, key=lambda window: tried[window].milliseconds)  # the first of those that are equally fast
shown = {f"window {w}": f"{s.milliseconds:.0f} ms, buffers up to {s.peak / 1e6:.1f} MB" for w, s in tried.items()}
compare({"enough": enough}, {"enough": fastest, **shown})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With a window of 4, rank 0 works without a pause. It waits only for its first bucket, and at the end for the last
# weights, and no window can hide these two waits. With a window of 3 it still waits in the middle, for bucket 3.
#
# ```python
# enough = 4
# ```
#
# </details>

# %% [markdown]
# ## Find the missing wait
#
# This program also sends each update to the other ranks (a *share*), through two buffers in turn.

# %%
print(lesson.say_program())
lesson.draw_program(lesson.run_program(lesson.PROGRAM, dp * tp), "The program as it stands")

# %% [markdown]
# In the picture, `g` is a gather and `s` a share. Until you have waited for a share, it may still read its buffer.
# Before which line must the program wait, and for which ticket?
#
# <details><summary>Hint</summary>
#
# There are two buffers, so matrix i writes into the one that matrix i − 2 used. Who may still be reading it?
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
before = ...  # the number of a line
ticket = ...  # such as "coming[i]"; for the first matrices there is no such ticket yet: there the wait is skipped

# %%
find.check(before, ticket)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Line 9 writes into a buffer that matrix i − 2 used last, so the share of that matrix must have ended.
#
# ```python
# before = 9
# ticket = "leaving[i - 2]"
# ```
#
# </details>

# %% [markdown]
# Here a gather takes 2 ms, work 3 and a share 8. How long may a share take, if the bug is to stay hidden?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
# s(i) shares matrix i. As the work on matrix i + 2 ends, it writes into the buffer that s(i) reads. In the picture,
# when do s1 and the work on matrix 3 begin?
longest = ...  # the longest share, in whole milliseconds, with which no buffer is written before its share has ended

# %% tags=["answer"]
early = {share: lesson.overwrites(share, dp * tp) for share in range(1, 9)}
shown = {f"overwritten too early with {share} ms": matrices for share, matrices in early.items() if matrices}
compare({"longest": longest}, {"longest": max(share for share in early if not early[share]), **shown})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The link serves the gather of matrix i + 2 just before s(i), and the work on matrix i + 2 waits for that gather, too.
# So s(i) and this work begin together, as s1 and matrix 3's do, and the work's end writes the buffer. The rule: a
# share must not take longer than the work. (s0 begins earlier than the work on matrix 2, so 5 ms would be short enough
# for it alone.) With such a fast link your tests pass. Then the program goes wrong on a slower one, or on a busy one.
#
# ```python
# longest = 3  # as long as the work on a matrix
# ```
#
# </details>

# %% [markdown]
# All ranks must also ask in the same order, or gathers of equal size would silently mix pieces of two matrices.
#
# <details><summary>An open task: in which order should a rank ask? (30 minutes)</summary>
#
# Matrices are rarely alike. Draw gathers and works of six matrices at random, and find an order with the least
# `makespan`, with a window of 6. `itertools.permutations` finds it by trying all, so you can check any idea. There is
# more than one good answer. A good page
#
# 1. states a rule that needs no trying, and shows how often it is best on times that you did not choose for it;
# 2. says in a few sentences why exchanging two neighbours in its order gains nothing;
# 3. shows times on which it fails with a window of 2, and says why the window matters;
# 4. says what all ranks of a real step would have to agree on before they could use it.
#
# </details>
#
# <details><summary>A solution of the open task: a rule</summary>
#
# [Johnson (1954)](https://doi.org/10.1002/nav.3800010110): begin with the matrices whose gather is shorter than their
# work, the shortest gather first. Then come the others, the longest work first. If the window holds all matrices, no
# order is faster. With a window of 2 it can fail: for gathers of 1, 2 and 9 ms and works of 10, 5 and 3 ms, its order
# takes 23 ms, and the order first, third, second takes 19.
#
# </details>
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - A call that returns has launched something. Whatever you compute after a wait sees the collective's result. With
#   Gloo the wait returns only once the collective is done. With NCCL, the library on GPUs, it may return earlier,
#   because the GPU does the waiting.
# - The busier of link and rank sets the pace, and prefetch hides the other behind it. A larger window holds more
#   buffers, at most all of them.
# - Do not use a buffer before you have waited for it.
# - All ranks ask in one order.
# - If computing and sending share a core, overlap gains little, because they take turns.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "window 4": ...,  # milliseconds of prefetch with the quick times and a window of 4
    "held": ...,  # how many matrices does prefetch hold with a window of 3?
    "exposed": ...,  # milliseconds that rank 0 waits with a window of 2 and the quick times
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A gather is shorter than the work on a matrix, so from a window of 2 on, each gather but the first is over before the
# rank needs its matrix. Nothing hides the first: the rank waits for it, and then works without a pause. With a window
# of 3 it holds the matrix that it works on, and those that it has asked for ahead.
#
# ```python
# gather, work, count = 2, 3, 4
# answers = {"window 4": gather + count * work, "held": 1 + 2, "exposed": gather}
# ```
#
# </details>

# %% [markdown]
# ## Does reality agree?
#
# In half of the real steps recorded here, all ranks shared one slowed-down link, a **bus**.

# %%
recording = lesson.recorded()
print(lesson.say_about(recording))
makespan = clocks.accepted_or(lesson.makespan)

# %% [markdown]
# With a window of 1, a rank computes and waits in turn. By your `makespan`, how long would the step take with a window
# of 3?
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
def with_window_3(computes, waits, count):
    # computes, waits: milliseconds of all `count` matrices together, which are equally large
    return ...  # milliseconds of the whole step

# %%
recorded.check(with_window_3)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# With a window of 1 nothing overlaps, so all of a rank's waiting is its gathers.
#
# ```python
# def with_window_3(computes, waits, count):
#     return makespan([waits / count] * count, [computes / count] * count, 3)
# ```
#
# </details>

# %%
with_window_3 = recorded.accepted_or(lesson.with_window_3)
print(lesson.say_gains(recording, with_window_3))

# %% [markdown]
# Your `makespan` gives each rank a core and a link of its own. But all ranks share two cores in the first row, and
# one link in the last, so in both its time is a fifth too short.
#
# <details><summary>How little was left to hide</summary>
#
# In the first row, ranks had work for 2.9 cores on average, but there were only two. In the last row they shared the
# link, which needed 849 of the 907 ms for their 21 MB. The timed world takes this sharing into account.
#
# </details>
#
# Now your machine. Each rank gets its own link, so slow that a gather takes twice as long as the work. How much can
# window 3 save?

# %% tags=["ranks", "volatile"]
runs = lesson.run_on_slow_links(prefetch, dp * tp, seed, (1, 3), steps, backend=backend)
lesson.draw_slow_links(runs, with_window_3)

# %% [markdown]
# <details><summary>What the picture showed on the machine that drew it</summary>
#
# Window 3 saved a quarter to a third, on two cores that all ranks shared with other programs. Ranks that share nothing
# would save about as much: by your `makespan`, the step falls from 18 times the work on one matrix to 13.
#
# </details>

# %% [markdown]
# ## Optional: a pipeline's stages wait for each other
#
# In a pipeline each rank, a **stage**, has some layers, and a batch comes in **micro-batches**. Each goes forward (F)
# through all stages, then backward (B, twice as long). In the order of GPipe, an early library for pipelines, all
# forwards come first:

# %%
def gpipe(stage, stages, micro):
    return "F" * micro + "B" * micro

lesson.draw_pipelines({"GPipe": gpipe})

# %% [markdown]
# A stage keeps a micro-batch's activations from F to B. **1F1B** (one forward, one backward) is as fast as GPipe but
# keeps as few as possible: once a stage has its first gradient, it does a B before each F. So the last stage's order
# begins FBFB. The others wait longer: with how many forwards does each begin?
#
# <details><summary>Hint</summary>
#
# On the first stage, take the time from the start of a micro-batch's F to the end of its B: for how many
# micro-batches, this one included, could the stage do F and B in that time?
#
# </details>
#
# *Medium · 8 minutes · optional*

# %% tags=["stub"]
def one_f_one_b(stage, stages, micro):
    # stage: from 0 to stages - 1; micro: how many micro-batches
    return ...  # such as "FFBFBB"

# %%
in_turn.check(one_f_one_b)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A micro-batch has `stages - stage` stages left, counting this stage. Its way through them and back takes as long as
# this stage needs for F and B of `stages - stage` micro-batches, so this many keep the stage busy. If you begin with
# fewer forwards, the stage waits; if you begin with more, it keeps more, and is no faster. Stages idle less with
# [several parts of a model on each](https://arxiv.org/abs/2104.04473) (Megatron-LM) or [a B that is split in
# two](https://arxiv.org/abs/2401.10241) (Zero Bubble).
#
# ```python
# def one_f_one_b(stage, stages, micro):
#     ahead = min(micro, stages - stage)
#     return "F" * ahead + "BF" * (micro - ahead) + "B" * ahead
# ```
#
# </details>

# %%
one_f_one_b = in_turn.accepted_or(lesson.one_f_one_b)
lesson.draw_pipelines({"GPipe": gpipe, "1F1B": one_f_one_b})

# %% [markdown]
# ## Optional: compute again what you do not keep
#
# Your first stage still keeps four micro-batches, and the last one keeps one. With **recomputing**, F keeps only its
# input, and B computes forward again. Write F and B of such a stage. It has dropout, and its gradients must not change
# by a bit.
#
# <details><summary>Hint</summary>
#
# Under `torch.no_grad()`, forward keeps nothing. `x.requires_grad_()` makes the input a leaf, which gets a gradient
# when you call `y.backward(gradient)`. Dropout draws the same entries again if you set the state of the random numbers
# back: `torch.get_rng_state()`, `torch.set_rng_state(state)`. Other micro-batches draw from it, too.
#
# </details>
#
# *Medium · 10 minutes · optional*

# %% tags=["stub"]
def forward(stage, x):
    return ..., ...  # the output, and what you keep until B

def backward(stage, kept, gradient):
    # gradient: of the output. Adds to the .grad of the stage's parameters
    return ...  # the gradient of x

# %%
again.check(forward, backward)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# If B left the state where its own dropout ended, the next F would change. F takes one unit, and B three in place of
# two, so the price is a third more computing.
#
# In your training, `torch.utils.checkpoint.checkpoint(stage, x, use_reentrant=False)` does all of it. [Chen et
# al.](https://arxiv.org/abs/1604.06174) made this common in 2016. [Korthikanti et
# al.](https://arxiv.org/abs/2205.05198) recompute only what is large and cheap, the middle of attention.
#
# ```python
# def forward(stage, x):
#     before = torch.get_rng_state()
#     with torch.no_grad():
#         return stage(x), (x, before)
#
# def backward(stage, kept, gradient):
#     x, before = kept
#     after = torch.get_rng_state()
#     torch.set_rng_state(before)
#     y = stage(x.requires_grad_())
#     torch.set_rng_state(after)
#     y.backward(gradient)
#     return x.grad
# ```
#
# </details>

# %%
print(lesson.say_recomputing(one_f_one_b, *again.accepted_or((lesson.forward, lesson.backward))))

# %% [markdown]
# <details><summary>A build of an hour, without a stub: a pipeline</summary>
#
# Here a stage is one layer. In an empty folder, `python -m muon_tutorial.learn.builds pipeline` writes
# `test_pipeline.py`. Write `pipeline.py` beside it, with `dist.send` and `dist.recv` alone (write `dist.` before
# each), until `python test_pipeline.py` is green. `step(stage, batches, rank, ranks)` sends each micro-batch, a
# float64 tensor of 5 × 6, forward through all stages. Rank 0 takes it from `batches`; the other ranks get an equally
# long list of `None`. On the last rank, `out.square().sum()` is the loss of a micro-batch. Then gradients go back:
# when a stage has received the gradient of its output `y`, it calls `y.backward(gradient)`. Gradients of all
# micro-batches add up.
#
# </details>
#
# <details><summary>A hint for the build: where a gradient comes from</summary>
#
# What has been received has no graph, so `requires_grad_()` makes it a leaf, and after backward its `.grad` is the
# gradient that the previous stage is waiting for. Keep each pair of input and output until its gradient comes.
#
# </details>
#
# <details><summary>A solution of the build, and why it is so</summary>
#
# It is `muon_tutorial/learn/builds/reference/pipeline.py`. All micro-batches go forward before the first comes back,
# so a stage computes the next while its neighbour computes this one: with P stages and M micro-batches a rank is idle
# for P − 1 of M + P − 1 turns. It is tempting to take each micro-batch there and back, because then one pair
# suffices; but only one rank computes at a time. The price of the solution is memory, M pairs on each rank. In the
# order of your `one_f_one_b`, a rank would keep at most P pairs, with the same idle turns.
#
# </details>

# %% [markdown]
# Communication is never free, so the next lesson asks: is Muon cheaper than AdamW at all?
#
# *Read on:* [PyTorch Distributed](https://arxiv.org/abs/2006.15704)
