# %% [markdown]
# # 14 · What changes when ranks go from 32 to 16,384?
#
# Every doubling of the ranks makes twice as many owners for the same matrices. Who still has something to do, and
# what does a step wait for?

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
from muon_tutorial.learn import many_ranks as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Twenty minutes.** At the end you can say, for any model on any grid, what a step waits for: work, bytes, latency
# or one matrix. You have planned models that no laptop can hold.
#
# *You need* lesson 04 (owners and their makespan) and lesson 10 (the bill).
#
# - *Previous:* [13 · Is Muon cheaper than AdamW?](13_is_muon_cheaper.ipynb)
# - *Next:* [15 · It hangs, or lies. Which rank, which line?](15_it_hangs_or_lies.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 14` makes. It has
#   nothing to install.
#
# *All seconds here are predicted.* The planner walks the package's own step without data and charges it by a file
# that describes a machine, `muon_tutorial/timing/machines/h100-infiniband.json`. That file says where each number
# comes from, and which are estimates. At such a scale these seconds have never been compared with a clock. The
# parameters dp and tp below are for the cell that runs on real ranks, so choose what your machine can run.
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
from muon_tutorial.learn import many_ranks as lesson
from muon_tutorial.learn.widgets.reveal import compare

# %% [markdown]
# ## A grid you have not seen
#
# In the picture a matrix *lives* at one place along dp, cut over tp as `W[I, J_tp]@dp=k`, and all tp ranks there
# gather it and repeat its Newton–Schulz. So there are dp owners.
#
# <details><summary>Which strategy, and which others there are</summary>
#
# It is `layerwise` with `tp="repeat"`. Lesson 13's table has `tp="share"`: each matrix goes to one of these ranks.
# Under `owner`, any rank of the grid can own one.
#
# </details>
#
# A smaller model, the 8B, has 7 matrices in each of 32 layers, and also runs with tp=8. Predict:
#
# *Easy · 4 minutes · required*

# %% tags=["stub", "predict"]
idle = ...  # how many owners have nothing to do on 4,096 ranks?
shrinks = ...  # the busiest owner's Newton–Schulz on 2,048 ranks, divided by that on 4,096 (2: half as long; 1: no gain)
slower = ...  # True or False: a step takes longer on 16,384 ranks than on 4,096

# %%
unseen, wiring, quiz = lesson.all_exercises()
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
# When matrices run out, a **floor** remains, the time of the costliest matrix: its owner needs that long, whatever
# the others do. At which numbers of ranks do faster links help?

# %%
lesson.explore_scale(live=widgets)

# %% [markdown]
# They help where ranks are many, because there a step mostly waits for bytes.
#
# ## Even entries, uneven work
#
# Give each owner as many *entries* as the others, and the left half looks perfect:

# %%
print(lesson.say_shapes())
lesson.draw_balance()

# %% [markdown]
# But the largest matrix has eight times the entries of an expert's (2,048 × 7,168), and thirty times the work. So
# deal out by the cost of Newton–Schulz, the costliest first:

# %%
one = lesson.owned_models()[0]
lesson.draw_balance(one, lesson.assign(one.shapes, one.owners))

# %% [markdown]
# Now real processes take a step with such owners:

# %%
def step(rank):
    return lesson.step_with(rank, dp, tp, steps, seed, lesson.assign)

print(lesson.say_stepped(launch(step, dp * tp, backend=backend)))

# %% [markdown]
# One matrix is the floor here, too: number 8.
#
# ## Inside a node and between nodes
#
# A node is one machine with 8 GPUs, and links inside it are fast. Between nodes, each GPU has a slower network card
# of its own, and a ring uses the cards of all its members.
#
# For the 8B with dp=64 and tp=1, one ring runs through all ranks, and each sends all gradients. With tp=8 there are
# eight rings, each with one member in every node, and each rank sends an eighth. Which is done sooner?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
sooner = ...  # "tp=1", "tp=8" or "neither"

# %%
wiring.check(sooner)

# %% tags=["answer"]
print(lesson.say_wires())
compare({"sooner": sooner}, {"sooner": lesson.wires()})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The one ring uses all eight cards of a node. Each of the eight rings has one card, for an eighth of the bytes.
#
# ```python
# sooner = "neither"
# ```
#
# </details>

# %% [markdown]
# ## Experts have owners of their own
#
# Only a rank that holds an expert can own it. Here is a model with a trillion entries on 2048 GPUs:

# %%
print(lesson.say_experts())

# %% [markdown]
# Each owner gets many experts, so these balance by themselves. There are only two or three dense matrices for each
# owner, so the costliest sets the floor.
#
# <details><summary>Ask for any model</summary>
#
# `python -m muon_tutorial plan MODEL --grid dp=64,tp=8 --map map.svg`
#
# </details>
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - More ranks divide the work until matrices run out. Then the costliest matrix is the floor.
# - A rank's work shrinks, but the bytes that it sends hardly change, so in the end a step waits for them.
# - On a ring, latency would grow with the ranks, 2 (P − 1) messages one after the other (lesson 03). So libraries
#   change to a tree. Where they change, latency jumps. Otherwise each doubling adds one level.
# - Balance work, and not entries.
# - With tp, a rank sends fewer bytes between nodes, but over as many times fewer cards. Nothing is gained.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
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
# At that size something is always broken. The next lesson teaches you to find and repair the line.
