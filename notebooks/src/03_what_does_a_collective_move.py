# %% [markdown]
# # 03 · What does a collective move?
#
# Every rank holds one summand, and every rank needs the sum. Which messages do they exchange, how many bytes does
# each send, and how long does your machine take?

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
from muon_tutorial.learn import collectives as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty-five minutes.** At the end you can say, for the calls that this course is made of, which messages and how
# many bytes they send, in any dtype and on any number of ranks. And you have written such calls yourself, run them on
# real processes, and seen what happens if one is wrong. A good place to stop is before *Bytes, for any ring*. When you
# come back, run all cells above it again.
#
# *You need* lesson 00: what a rank is, and what `launch` does. Nothing about networks.
#
# - *Previous:* [02 · How do a few matrix products do it?](02_five_matrix_products.ipynb)
# - *Next:* [04 · How did the first distributed Muon work?](04_the_first_distributed_muon.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 03` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* only the product of dp and tp counts here: it is the number of ranks. At least two.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 2
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import collectives as lesson
from muon_tutorial.learn.widgets.reveal import compare
ranks, many = dp * tp, 2 * dp * tp
guess, guess_stuck = lesson.guess_bytes(many), lesson.guess_stuck()
ring, hard = lesson.check_ring(ranks, backend), lesson.check_reduce_scatter(ranks, backend)
formulas, timed, quiz = lesson.check_formula(), lesson.check_seconds(), lesson.quiz(ranks)

# %% [markdown]
# ## Follow a digit
#
# A **collective** is a call that all ranks make together. Inside it there are only messages. Here they follow a
# **ring**, from each rank to the next and from the last to rank 0. The messages of one **round** can travel at the
# same time.
#
# The picture shows an **all_reduce**: each rank brings a tensor, cut into pieces, and all leave with the sum. It has
# two halves. In a **reduce_scatter**, sums grow on their way until each rank has *one* finished piece; in an
# **all_gather**, each rank brings one piece and leaves with every piece.
#
# ## Predict

# %%
print(f"{many} ranks; a tensor of {many * 1024:,} float32 entries in {many} pieces; 4 bytes an entry")

# %% [markdown]
# In an all_reduce of this tensor, how many messages does *one* rank send, and how many bytes do these hold together?
#
# *Easy · 3 minutes · required*

# %% tags=["stub", "predict"]
messages = ...
bytes_sent = ...

# %%
guess.check(messages, bytes_sent)

# %% tags=["answer", "ranks"]
large = lesson.run_sum(lesson.ring_all_reduce, many, backend)
compare({"messages": messages, "bytes_sent": bytes_sent}, lesson.counted(large))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# In each half a rank sends all pieces except one, each in its own round.
#
# ```python
# messages = 2 * (many - 1)
# bytes_sent = messages * 1024 * 4
# ```
#
# </details>

# %% [markdown]
# ## The first thing that goes wrong
#
# Every collective can be built from two calls: `dist.send(tensor, to)` sends to one rank, and `dist.recv(tensor,
# source)` waits for a message from rank `source` and puts it into `tensor`. Below, the list `first` says what each
# rank does first:

# %%
def exchange(mine, rank, ranks, first):
    arrived = torch.empty_like(mine)
    if first[rank] == "send":
        dist.send(mine, (rank + 1) % ranks)
    dist.recv(arrived, (rank - 1) % ranks)
    if first[rank] == "receive":
        dist.send(mine, (rank + 1) % ranks)
    return arrived

# %% [markdown]
# Let everybody send first:

# %% tags=["volatile", "raises-exception"]
def everybody_sends_first(rank):
    return exchange(lesson.my_piece(rank, ranks), rank, ranks, ["send"] * ranks)

try:
    launch(everybody_sends_first, ranks, backend=backend, timeout=3.0)
except RankFailedError as error:
    print(lesson.say_failure(error))

# %% [markdown]
# Each rank waits in `send` until its neighbour receives, but the neighbour waits in its own `send`: a **deadlock**.
#
# <details><summary>Why such a program may pass its tests</summary>
#
# Some libraries put small messages aside and let `send` return at once. With those, the mistake passes every small
# test and waits for your first large tensor.
#
# </details>
#
# ## Send first, or receive first?
#
# Let each rank in a ring of four send first or receive first. In how many of the 16 settings does everybody wait for
# ever?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
stuck = ...

# %%
guess_stuck.check(stuck)

# %% tags=["answer", "ranks"]
settings = lesson.run_every_setting(exchange, backend)
print(lesson.say_stuck(settings))
compare({"stuck": stuck}, {"stuck": list(settings.values()).count(False)})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# stuck = 2
# ```
#
# The deadlocks are the settings in which all send first, or all receive first. As soon as one rank differs from its
# neighbour, a message passes between them, and that sets the next rank free.
#
# </details>

# %% [markdown]
# Real programs call `dist.isend`, which *starts* to send and returns a handle at once. You receive meanwhile, and the
# handle's `wait()` returns once your message has left.

# %%
def pass_my_number(rank):
    mine, arrived = torch.tensor([rank]), torch.tensor([-1])
    sending = dist.isend(mine, (rank + 1) % ranks)
    dist.recv(arrived, (rank - 1) % ranks)
    sending.wait()
    return arrived.item()

print("each rank received the number of:", launch(pass_my_number, ranks, backend=backend))

# %% [markdown]
# ## Write an all_gather
#
# Your function gets this rank's piece, and returns all pieces in the order of ranks. It may send to the next rank
# only.
#
# <details><summary>Hint</summary>
#
# After each round you have one more piece, and the next rank lacks exactly the one that has just come to you. In
# which round do you get the piece that began two places to your left?
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def ring_all_gather(mine, rank, ranks, group=None):
    # so that the ring also works within a part of the ranks (lesson 06), pass `group` on, and name your
    # neighbour by group_dst and group_src:
    # dist.isend(…, group=group, group_dst=…) and dist.recv(…, group=group, group_src=…)
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    pieces[rank] = mine
    return ...  # your rounds go before this line; then return pieces

# %%
ring.check(ring_all_gather)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# In each round a rank passes on the piece that the round before brought. If `wait()` stood before `recv`, all ranks
# would wait in it, as they did when everybody sent first.
#
# ```python
# def ring_all_gather(mine, rank, ranks, group=None):
#     pieces = [torch.empty_like(mine) for _ in range(ranks)]
#     pieces[rank] = mine
#     for step in range(ranks - 1):
#         sending = dist.isend(pieces[(rank - step) % ranks], group=group, group_dst=(rank + 1) % ranks)
#         dist.recv(pieces[(rank - step - 1) % ranks], group=group, group_src=(rank - 1) % ranks)
#         sending.wait()
#     return pieces
# ```
#
# </details>

# %% [markdown]
# ## Write the other half
#
# Your function gets all pieces of this rank's tensor and returns piece number `rank`, summed over all ranks. Where
# must piece p start, to end on rank p?
#
# <details><summary>Hint</summary>
#
# Look at the top picture. Piece 0 has to end at rank 0 after it has been everywhere else. So it sets out from rank 1,
# and each rank on its way adds its own piece 0 to what came.
#
# </details>
#
# (Par is for an all_reduce of 4,096 float32 entries: this half and your all_gather together.)
#
# *Hard · 12 minutes · required · par 24576 bytes a rank*

# %% tags=["stub"]
def ring_reduce_scatter(pieces, rank, ranks, group=None):
    # pieces: one for each rank, all of one length; leave them as they are
    return ...  # the sum of piece `rank` over all ranks

# %%
hard.check(ring_reduce_scatter)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# The piece that rank r sends first, number r − 1, travels `ranks - 1` places on the ring and ends at rank r − 1.
# Receive into a new tensor: `total` may still be leaving, and in the first round it is one of the caller's own pieces.
#
# ```python
# def ring_reduce_scatter(pieces, rank, ranks, group=None):
#     total = pieces[(rank - 1) % ranks]
#     for step in range(ranks - 1):
#         sending = dist.isend(total, group=group, group_dst=(rank + 1) % ranks)
#         arrived = torch.empty_like(total)
#         dist.recv(arrived, group=group, group_src=(rank - 1) % ranks)
#         sending.wait()
#         total = arrived + pieces[(rank - step - 2) % ranks]
#     return total
# ```
#
# </details>

# %% [markdown]
# <details><summary>A build of 75 minutes, without a stub: all the collectives of a ring</summary>
#
# In an empty folder, `python -m muon_tutorial.learn.builds ring` writes `test_ring.py`. Run it with
# `python test_ring.py`. It fails, because there is no `ring.py`. Write that file, and go on until all three stages
# are green.
#
# - `all_gather(piece, rank, ranks)`, `all_reduce(pieces, rank, ranks)` and `all_to_all(pieces, rank, ranks)` return a list
#   of pieces, `reduce_scatter(pieces, rank, ranks)` one piece, and `broadcast(x, rank, ranks, root)` the x of rank
#   `root`. None of them changes what it is given. In `all_to_all`, a rank brings one piece for each rank, and leaves
#   with the pieces that were meant for it.
# - In the second stage ranks may call only `dist.isend`, `dist.irecv`, `dist.send` and `dist.recv` (write `dist.` before
#   each, so that the test can see them), and send to the next rank only.
# - The third counts messages and their entries: what a rank passes on in a round goes in one message.
#
# Keep the file: lesson 11's build fetches its weights with it.
#
# </details>
#
# <details><summary>A hint for the build: what travels in a round</summary>
#
# Draw rank 2 of 4. In each round it sends what came in the round before, so say what it holds after each, as in the
# exercise above. In `all_to_all`, everything that is not yet at its goal moves one rank on: how many pieces still
# travel in round 1, and how many in round 2?
#
# </details>
#
# <details><summary>A solution of the build, and why it is so</summary>
#
# It is `muon_tutorial/learn/builds/reference/ring.py`. `pass_on` begins to send before it receives. If all ranks
# first called `dist.send`, and a message did not fit into the buffers, every one would wait for its neighbour to
# receive, for ever. `all_reduce` is a reduce_scatter and then an all_gather. It is tempting to gather all pieces and
# to add them up at home: that takes half as many messages but P / 2 times as many entries, and each rank does the
# same sum. `all_to_all` stacks all pieces that still travel into one message, because each message costs its latency
# again.
#
# </details>
#
# ## Bytes, for any ring
#
# How many bytes does one of P ranks send in each collective?
#
# <details><summary>Hint</summary>
#
# A piece has `entries / ranks` entries. How many pieces does a rank send in each half?
#
# </details>
#
# *Medium · 5 minutes · required*

# %% tags=["stub"]
def formula(collective, entries, itemsize, ranks):
    # collective: "all_gather", "reduce_scatter" or "all_reduce"; entries: of the whole tensor, all pieces
    # itemsize: the bytes of an entry, 4 in float32, 2 in bfloat16
    return ...

# %%
formulas.check(formula)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def formula(collective, entries, itemsize, ranks):
#     halves = 2 if collective == "all_reduce" else 1
#     return halves * entries * itemsize * (ranks - 1) / ranks
# ```
#
# </details>

# %% [markdown]
# Each half sends (P − 1)/P of the tensor's bytes, less than the whole tensor even on a thousand ranks.
#
# <details><summary>What ZeRO sends, as layouts</summary>
#
# Data parallel training sends an all_reduce of gradients anyway. With an optimizer that works entry by entry, ZeRO
# sends no more: between the two halves each rank updates its piece of the weights. Muon needs whole matrices, so it
# also needs one more gather (lesson 05).
#
# Each rank begins with its own gradient g of B entries, `g[B]{U_dp}`, where `{U_dp}` says that the sum over dp is
# still to be taken. After the first half it has *one* piece of the sum, `g[B_dp]`, which is all it needs to update
# its piece of the weights. The second half sends the updated pieces to all.
#
# </details>
#
# <details><summary>Other collectives, and what is not a ring</summary>
#
# We always count what *one rank sends*, on a ring. (In an all_to_all, gather or scatter, messages go straight to their
# goal.) S is the bytes of the whole tensor. (The row of all_to_all is different: there, each rank brings a piece for
# every rank. S is the size of the ranks' tensors together, so one rank brings S/P.)
#
# | collective | bytes |
# |---|---|
# | all_to_all | (P − 1)/P · S/P |
# | broadcast | S; along a chain of ranks, the last one sends nothing |
# | reduce | S; the root, which ends up with the sum, sends nothing |
# | gather | S/P, and the root nothing |
# | scatter | the root (P − 1)/P · S, all others nothing |
#
# GPUs use rings where bytes matter. Where a tensor is small and ranks are many, they use a **tree** instead: about as
# many bytes, but fewer messages have to wait for one another (lesson 14). Gloo, the library between your processes
# here, goes other ways for some calls. Lesson 13 puts ring and Gloo side by side.
#
# </details>
#
# ## And the clock?
#
# Every message takes a fixed time, its **latency**, and then time for its bytes: **bandwidth** says how many pass in
# a second. To measure both, let a ball go from rank 0 to rank 1 and back:

# %%
sizes = [4**power for power in range(1, 13)]
def there_and_back(rank, ball):
    for turn in (0, 1):
        dist.send(ball, 1 - rank) if rank == turn else dist.recv(ball, 1 - rank)

def ping_pong(rank):
    balls = [torch.zeros(size // 4) for size in sizes]
    lesson.fastest(4 * steps, there_and_back, rank, balls[0])  # a warm-up: the first messages are slow
    return [lesson.fastest(4 * steps, there_and_back, rank, ball) / 2 for ball in balls]

# %% tags=["volatile"]
seconds = launch(ping_pong, 2, backend=backend)[0]
wire = lesson.fit_wire(sizes, seconds)
print(lesson.say_wire(wire, sizes, seconds))

# %% tags=["volatile"]
lesson.picture_of_wire(wire, sizes, seconds)

# %% [markdown]
# On the left you pay for latency alone, on the right for bytes. How long does a ring's all_reduce take?
#
# *Easy · 4 minutes · required*

# %% tags=["stub"]
def ring_seconds(size, ranks, latency, bandwidth):
    # size: bytes of the whole tensor; the messages of a rank go out one after the other
    return ...

# %%
timed.check(ring_seconds)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Every message pays latency, because it waits for the one before it, and carries the bytes of only one piece,
# `size / ranks`.
#
# ```python
# def ring_seconds(size, ranks, latency, bandwidth):
#     messages = 2 * (ranks - 1)
#     return messages * (latency + size / ranks / bandwidth)
# ```
#
# </details>

# %% tags=["volatile"]
ring_seconds = timed.accepted_or(lesson.ring_seconds)
for many_ranks in (2, 16, 128, 1024):
    took = ring_seconds(1e6, many_ranks, wire.latency, wire.bandwidth)
    print(f"a megabyte over {many_ranks:5,} ranks, on this wire: {1e3 * took:8.2f} ms")

# %% [markdown]
# On many ranks that is mostly latency, which every collective pays again, so optimizers pack small matrices into one
# large buffer.
#
# <details><summary>Why are two bandwidths printed?</summary>
#
# One belongs to the line, which has to fit all dots. The other is the last dot's alone, its bytes divided by its
# time. Messages as large as that no longer fit into the processor's caches, so on most machines each byte costs more
# than the line says, and the dot lies above the line.
#
# </details>
#
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - If all ranks send first, all of them wait for ever: a deadlock. Start to send, receive, and then wait.
# - all_reduce = reduce_scatter + all_gather. Each half sends (P − 1)/P of entries × bytes per entry.
# - A message takes latency + bytes / bandwidth.
#
# </details>
#
# **Quiz.**
#
# *Easy · 3 minutes · required*

# %% tags=["stub"]
answers = {
    "messages": ...,  # how many messages does each of `ranks` ranks send in a ring's all_reduce?
    "share": ...,  # what part of an all_reduce's bytes does its all_gather send?
    # an all_reduce of a million bfloat16 entries, with P = 8. How many bytes does each rank send?
    "bytes": ...,
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# An all_reduce has two halves, and in each of them a rank sends every piece but one, in a message of its own. The
# all_gather is one of these halves. With P = 8, a half sends seven eighths of the entries, at 2 bytes each.
#
# ```python
# size = 2 * 7 / 8 * 1_000_000 * 2
# answers = {"messages": 2 * (ranks - 1), "share": 1 / 2, "bytes": size}
# ```
#
# </details>

# %% [markdown]
# ## Your ring, on real ranks
#
# Do both halves together equal PyTorch's `all_reduce`?

# %% tags=["ranks"]
gather = ring.accepted_or(lesson.ring_all_gather)
reduce_scatter = hard.accepted_or(lesson.ring_reduce_scatter)
def all_reduce(pieces, rank, ranks):
    return gather(reduce_scatter(pieces, rank, ranks), rank, ranks)

def same_as_torchs(rank):
    pieces = lesson.my_pieces(rank, ranks)  # small whole numbers, so no sum is rounded
    torchs_own = torch.cat(pieces)
    dist.all_reduce(torchs_own)
    return torch.equal(torch.cat(all_reduce(pieces, rank, ranks)), torchs_own)

print("the same bits on every rank:", all(launch(same_as_torchs, ranks, backend=backend)))

# %% [markdown]
# Do your ranks send what your formula says?

# %% tags=["ranks"]
formula = formulas.accepted_or(lesson.ring_formula)
for dtype in (torch.float32, torch.bfloat16):
    run = lesson.run_sum(all_reduce, ranks, backend, dtype)
    print(lesson.say_bytes(run, dtype, formula))

# %% tags=["ranks"]
total = lesson.run_sum(all_reduce, ranks, backend)
lesson.explore_sum(total, live=widgets)

# %% [markdown]
# The next lesson asks how the first distributed Muon shared Newton–Schulz with such calls.
#
# *Read on:* [The ring, piece by piece](https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/)
