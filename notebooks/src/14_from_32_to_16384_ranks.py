# %% [markdown]
# # 14 · What changes when ranks go from 32 to 16,384?
#
# Every doubling of ranks makes twice as many owners for the same matrices. Who still has something to do, and what does
# a step wait for in the end?

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
from muon_tutorial.learn import many_ranks as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Forty minutes.** The hard exercise takes twenty more. At the end you can say, for any model on any grid, what a step
# waits for: work, bytes, latency or one matrix. You have planned models that no laptop can hold.
#
# *You need* lesson 04 (owners and their makespan) and lesson 10 (the bill).
#
# - *Previous:* [13 · Is Muon cheaper than AdamW?](13_is_muon_cheaper.ipynb)
# - *Next:* [15 · It hangs, or lies. Which rank, which line?](15_it_hangs_or_lies.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 14` makes. It has
#   nothing to install.
#
# *All seconds here are predicted.* The planner walks the package's own step without data, and charges it by the file
# of a machine: `muon_tutorial/timing/machines/h100-infiniband.json`. That file says where each number comes from, and
# which are estimates. Nobody has held these seconds against a clock at such a scale. dp and tp below are for the cell
# that runs on real ranks; take what your machine can bear.
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
# Nothing ran for that picture. The planner of lesson 13 walks a step without data, and charges it by a file about the
# machine. The strategy is lesson 13's `layerwise`, and its owners are not those of lesson 10's `owner`. There, the owner
# of a matrix is one rank of the whole grid. Here it is a place along dp, because the matrix *lives* there, cut over tp:
# all tp ranks at that place gather it and repeat its Newton–Schulz. So the number of owners is dp.
#
# The 70B has 560 matrices. Its little sister, 8B, has 7 in each of 32 layers. Take tp=8 again.
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
# 4,096 / 8 owners share 7 · 32 matrices. On half as many ranks there are 256 owners: enough for one matrix each. Only
# latency grows from here on.
#
# ```python
# idle = 4096 // 8 - 7 * 32
# shrinks = 1
# slower = True
# ```
#
# </details>

# %% [markdown]
# Owners run out before ranks do. And the costliest matrix is a **floor**: its owner needs that long, whatever others
# do. Press play (each stop doubles the ranks), and watch the grey. When do faster links help?

# %%
lesson.explore_scale(live=widgets)

# %% [markdown]
# Faster links help most where ranks are many: there, a step waits for bytes. Where they are few, it computes.
#
# ## Even entries, uneven work
#
# As long as there are enough matrices, be fair. Somebody gave each owner as many *entries* as the next. Perfect, on the
# left:

# %%
print(lesson.say_shapes())
lesson.draw_balance()

# %% [markdown]
# The largest (7,168 × 16,384) has eight times the entries of an expert's (2,048 × 7,168), and thirty times the work.
# So weigh each matrix by its Newton–Schulz, and deal the costliest out first, as in lesson 11:

# %%
one = lesson.owned_models()[0]
lesson.draw_balance(one, lesson.assign(one.shapes, one.owners))

# %% [markdown]
# Now their work is even, and their entries are not. Without the planner: such owners, in a step of real processes.
# (This step takes the strategy `owner`, so that every rank of the grid is an owner, and the ranks of a tp group own
# different matrices.) Do they change the result?

# %%
def step(rank):
    return lesson.step_with(rank, dp, tp, steps, seed, lesson.assign)

print(lesson.say_stepped(launch(step, dp * tp, backend=backend)))

# %% [markdown]
# Not by a bit. And here, too, one matrix is the floor: see who owns number 8.
#
# ## Inside a node and between nodes
#
# Inside a node of 8 GPUs, links are fast. Between nodes each GPU has a slower card of its own. If a ring has several
# members in a node, its traffic leaves the node over all their cards.
#
# Take dp=64 for the 8B. With tp=1 one ring runs through all, and each rank sends all gradients. With tp=8 there are
# eight rings with one member a node, and each rank sends an eighth. Which is sooner?
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
# Eight rings share the cards that one ring had to itself.
#
# ```python
# sooner = "neither"
# ```
#
# </details>

# %% [markdown]
# ## Experts have owners of their own
#
# With expert parallelism, only ranks that have the same experts share them. A trillion entries on 2048 GPUs:

# %%
print(lesson.say_experts())

# %% [markdown]
# Many experts, few owners: they balance by themselves. The few dense matrices set the floor.
#
# ## Recap
#
# - More ranks share out work until owners run out. Then the costliest matrix is the floor.
# - The bytes that a rank sends stay as they are, ring or tree: in the end, a step waits for them.
# - Round a ring, latency would grow with the ranks, 2 (P − 1) messages one after the other (lesson 03). Libraries change
#   to a tree there, whose depth grows by one with each doubling, and so does latency.
# - Balance work, not entries.
# - tp divides the bytes that a rank sends between nodes, and the cards that its ring has, by as much: nothing gained.
#
# Any model: `python -m muon_tutorial plan MODEL --grid dp=64,tp=8 --map map.svg`.
#
# **Quiz.** One line measures each.
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
# At that size something is always broken. In the next lesson you learn to find out on which rank, and in which line.
