# %% [markdown]
# # 12 · Why does `step()` return before the work is done?
#
# You put a stopwatch around one call. Does it measure the work, and if not, who does that work, when, and what could
# your program do in the meantime?

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
from muon_tutorial.learn import early_return as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty-five minutes.** The hard exercise takes twenty more. At the end you can read a timeline, say how long a
# schedule takes before it runs, write the loop that hides communication behind work, and find the wait that it lacks.
#
# *You need* lesson 03 (collectives) and lesson 09 (ranks as generators).
#
# - *Previous:* [11 · How do I plug in my own sharding?](11_my_own_sharding.ipynb)
# - *Next:* [13 · Is Muon cheaper than AdamW?](13_is_muon_cheaper.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 12` makes. It has
#   nothing to install.
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
guess, ahead, find, quiz = lesson.all_exercises(dp * tp, seed)
_ = my_muon.so_far("12")

# %% [markdown]
# ## The call returns, the work does not
#
# An all_reduce of sixteen megabytes, on real ranks. Somebody puts a stopwatch around the call.

# %% tags=["ranks", "volatile"]
def stopwatch(rank):
    tensor = torch.ones(4_000_000)
    dist.barrier()
    begin = time.time()
    work = dist.all_reduce(tensor, async_op=True)
    called = time.time()
    work.wait()
    return called - begin, time.time() - called

print(lesson.say_stopwatch(launch(stopwatch, dp * tp, backend=backend)))

# %% [markdown]
# Compare the two times: the call is over long before sixteen megabytes can have travelled. (Slow calls? Another rank
# had the core just then.) It is **asynchronous**: it hands the tensor to another thread and returns. Until the wait
# returns, the tensor belongs to that thread. *Launch is not execution.*
#
# On a GPU *every* operation is like that; on CPUs, only communication. `step()` returns when its kernels are
# launched, and without `torch.cuda.synchronize()` your watch times the launch. A kernel that waits for other ranks
# spins: waiting looks busy.
#
# So draw two lanes for each rank, as in the first picture: what it computes, and what is on its way. Each bucket of
# this `zero1` step, by its number, travels three times: reduce_scatter, dp gather, all_gather. In the lower half
# several buckets are in flight: one travels while another is computed. That is **overlap**. What it cannot hide, the
# hatched time, is **exposed**.
#
# ## How long does a schedule take?
#
# In lesson 09 a rank was a generator. Here it asks in one line and waits in another. On real processes, `yield
# Start(…)` calls with `async_op=True`, the **ticket** that comes back is `work` from above, and `yield Wait(…)` waits
# for it.

# %%
def one_by_one(count, gather, work, window=1):
    for i in range(count):
        ticket = yield Start(gather(i))  # ask for matrix i, and go on
        whole = yield Wait(ticket)  # go on when it is there
        work(i, whole)  # Newton–Schulz

quick = lesson.LoopTimes.alike(4, gather=2, work=3)  # milliseconds of each
slow = lesson.LoopTimes.alike(4, gather=5, work=3)

# %% [markdown]
# How many milliseconds does this loop take with the `quick` times? A second loop asks for the next matrix before it
# works on this one. How long does that one take, with `quick` times and with `slow` ones?
#
# *Easy · 4 minutes · required*

# %% tags=["stub", "predict"]
one_at_a_time = ...
ahead_of_work = ...
slow_link = ...

# %%
guess.check(one_at_a_time, ahead_of_work, slow_link)

# %% tags=["answer"]
said = {"one_at_a_time": one_at_a_time, "ahead_of_work": ahead_of_work, "slow_link": slow_link}
compare(said, lesson.makespans(dp * tp), lesson.draw_schedules(dp * tp))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Four times both; the first gather and all the work; all gathers and the last work.
#
# ```python
# one_at_a_time = 4 * (2 + 3)
# ahead_of_work = 2 + 4 * 3
# slow_link = 4 * 5 + 3
# ```
#
# </details>

# %% [markdown]
# ## Write the loop that asks ahead
#
# To ask early is called **prefetch**. The **window** says how many matrices may be asked for and not yet done. 1 is the
# loop above; with 2, the next one travels while you work. Each costs memory, so never hold more.
#
# *Medium · 10 minutes · required*

# %% tags=["stub"]
def prefetch(count, gather, work, window):
    # as one_by_one, but before you wait for matrix i, all up to i + window - 1 have been asked for
    return ...

# %%
ahead.check(prefetch)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `pop` matters: a ticket that you keep keeps its matrix.
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
# What does it gain? The **timed world** (ranks as generators, each with a clock) says, for times that we choose:

# %%
prefetch = ahead.accepted_or(lesson.prefetch)
for window in (1, 2, 4):
    timed = lesson.time_loop(prefetch, quick, window, dp * tp)
    print(f"window {window}: {timed.milliseconds:g} ms, holds {timed.watch.held}")

# %% [markdown]
# And real ranks, with real matrices and Newton–Schulz, say whether it is *right*:

# %% tags=["ranks", "volatile"]
run = lesson.run_loop(prefetch, dp * tp, seed, window=2, backend=backend)
print(run)
lesson.draw_run(run.timeline, "Your loop on this machine, window 2")

# %% [markdown]
# ## Play with the window
#
# The package's own step again. Nothing runs: these seconds follow from a machine's file. Press play for each link.
# Which one saves the largest part of its step? From which window on is nothing left to gain? And what happens on a
# bare loopback, where both ranks share one core, which also sends?

# %%
lesson.explore_windows(live=widgets)

# %%
for window in (1, 2, 3, 6):
    step = lesson.predict("50 Mbit/s", window)
    print(f"window {window}: {step.milliseconds:.0f} ms, buffers up to {step.peak / 1e6:.1f} MB")

# %% [markdown]
# The link of 200 Mbit/s saves most, almost a third of its step: there, both lanes are about as long. Only the shorter
# lane can hide.
#
# Overlap needs two things that can be busy *at the same time*. With more ranks than cores on a loopback there is one:
# while a rank waits, another computes or copies bytes.
#
# ## Find the missing wait
#
# This program shares its updates, too, through two buffers that it uses in turn. One line is missing.

# %%
print(lesson.say_program())
lesson.broken_program(dp * tp)

# %% [markdown]
# `g` is a gather, `s` a share. Before which line must it wait, and for which ticket? A wait for a ticket that is not
# there yet is skipped. Your answer runs, in a world that reads a buffer as late as it may: when you wait for it.
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
before = ...  # the number of a line
ticket = ...  # such as "coming[i]"

# %%
find.check(before, ticket)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Line 9 writes a buffer that matrix i − 2 used last. Its share must have ended.
#
# ```python
# before = 9
# ticket = "leaving[i - 2]"
# ```
#
# </details>

# %% [markdown]
# Why does such a bug live long? Because of fast links:

# %%
for share in (1, 8):
    print(lesson.say_overwriting(share, dp * tp))

# %% [markdown]
# A second trap. Each rank asks in the order that it likes:

# %%
def as_i_please(rank):
    for i in [0, 1] if rank == 0 else [1, 0]:
        yield lesson.asked_for("gather", i, 2, dp * tp)

print(lesson.try_in_timed_world(as_i_please, dp * tp))

# %% [markdown]
# Our worlds compare labels. Gloo does not: these gathers are of one size, and ranks would get other matrices without a
# word. The order must follow from what *all* ranks know, never from what is ready first.

# %% [markdown]
# ## Does reality agree?
#
# A notebook cannot slow its loopback down. So here is a recording, with a limit that turns the loopback into a **bus**:
# one slow link that all ranks share.

# %%
recording = lesson.recorded()
print(lesson.say_about(recording))

# %%
expected = lesson.predict_recorded(recording)
lesson.explore_recording(recording, expected, live=widgets)

# %% [markdown]
# Above, what the timed world says for that machine; below, what happened. And what a window of 3 saved:

# %%
print(lesson.say_gains(recording, expected))

# %% [markdown]
# Why so little? On this bus, a rank of `zero1` computes for less than half a second and sends for twelve. Only the
# shorter lane can hide behind the longer one, and here it is that half second. That is the column *predicted*, which
# says what overlap alone can save.
#
# In some rows more was *saved* than that. There, ranks had idled between their turns on a core, and a larger window
# gave them something to do; the timed world, whose turns are perfect, knows no such gaps. Now your machine, on its
# bare loopback. If it has fewer cores than ranks, look for a moment when no rank computes.

# %% tags=["ranks", "volatile"]
plan = lesson.plan_of(dp * tp, buckets=4, side=256)
mine = lesson.record_steps(plan, (1, 3), steps, backend)
lesson.draw_recorded_windows(mine, (1, 3), "The package's step on this machine")

# %% [markdown]
# ## Recap
#
# - A call that returns has launched something. Only a wait says that it is done.
# - The busier lane sets the pace. Prefetch hides the other one. A larger window holds more buffers,
#   until all of them are under way.
# - Before the wait, a buffer is not yours.
# - All ranks ask in one order.
# - Where ranks and sending share cores, overlap has nothing to hide behind.
#
# **Quiz.** One line measures each.
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "endless": ...,  # milliseconds of prefetch with the quick times and a window of 4
    "held": ...,  # how many matrices does prefetch hold with a window of 3?
    "exposed": ...,  # milliseconds that rank 0 waits with a window of 2 and the quick times
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# timed = {window: lesson.time_loop(lesson.prefetch, quick, window, dp * tp) for window in (2, 3, 4)}
# exposed = round(1000 * timed[2].timeline.total("wait", 0))
# answers = {"endless": timed[4].milliseconds, "held": timed[3].watch.held, "exposed": exposed}
# ```
#
# </details>

# %% [markdown]
# You can hide messages behind work now. Is Muon then cheaper than AdamW? The next lesson counts.
