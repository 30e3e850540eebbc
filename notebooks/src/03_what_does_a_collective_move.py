# %% [markdown]
# # 03 · What does a collective move?
#
# **Twenty-five minutes.** At the end you can say, for the calls that all of this course is made of, which
# messages they send, how many bytes, and what your machine takes for them. And you have written such a call
# yourself, run it on real processes, and seen what a wrong one says.
#
# *You need* lesson 00: what a rank is, and what `launch` does. Nothing about networks.
#
# - *Previous:* [02 · How do five matrix products do it?](02_five_matrix_products.ipynb)
# - *Next:* [04 · How did the first distributed Muon work?](04_the_first_distributed_muon.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 03` makes. It has
#   nothing to install.

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% tags=["parameters"]
dp: int = 2
tp: int = 2
steps: int = 5
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %%
import inspect
import torch
import torch.distributed as dist
from muon_tutorial import launch
from muon_tutorial.errors import RankFailedError
from muon_tutorial.learn import collectives as lesson

# %% [markdown]
# ## Everybody has a piece, everybody wants all
#
# A rank cannot look into another rank's memory. What it wants to know must be sent. PyTorch offers calls
# that all ranks make together, and after which all of them know something: a **collective**. The plainest
# is **all_gather**: each rank brings one piece, and all leave with all pieces.
#
# Inside, there are only messages from one rank to another. Here they are, for the simplest good way: a
# **ring**, in which rank 0 sends to rank 1, rank 1 to rank 2, and the last one to rank 0 again. These
# messages were sent just now, by real processes. Time runs downwards. All messages of a **round** can travel
# at the same time.

# %% tags=["ranks"]
ranks = dp * tp
guess, ring = lesson.predict(ranks), lesson.check_ring(ranks, backend)
lesson.picture_of_gather(lesson.run_gather(lesson.ring_all_gather, ranks, backend), "collectives-first")

# %% [markdown]
# Follow one number through the picture: each rank passes on what came last. (An arrow that leaves the card on
# the right comes in again on the left.) In this lesson only the number of ranks counts, not their grid.
#
# ## Predict
#
# Each piece has 1024 numbers of type float32, 4 bytes each. Until everybody has everything: how many messages
# does *one* rank send? How many bytes are that?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
messages_of_one_rank = ...
bytes_of_one_rank = ...

# %%
guess.check(messages_of_one_rank, bytes_of_one_rank)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# messages_of_one_rank = ranks - 1
# bytes_of_one_rank = messages_of_one_rank * 1024 * 4
# ```
#
# </details>

# %% [markdown]
# ## The first thing that goes wrong
#
# `dist.send(tensor, to)` sends a tensor to one rank. `dist.recv(tensor, source)` waits for one, and writes it
# into `tensor`. So here is the first round, as most people write it first. Read it, and guess what will
# happen, before you run it.

# %%
def everybody_sends_first(rank):
    mine, arrived = lesson.my_piece(rank, ranks), torch.empty(1024)
    dist.send(mine, (rank + 1) % ranks)
    dist.recv(arrived, (rank - 1) % ranks)
    return [mine, arrived]

# %% tags=["volatile", "raises-exception"]
try:
    launch(everybody_sends_first, ranks, backend=backend, timeout=3.0)
except RankFailedError as error:
    print(lesson.say_failure(error))

# %% [markdown]
# "No rank failed by itself": nothing is wrong with any one of them. Each waits in `send`, line 3, until its
# neighbour receives. But the neighbour waits in *its* `send`. Nobody gets to `recv`. This is a
# **deadlock**, and it has no end of its own. `launch` gave it three seconds (`timeout=3.0`), then each rank
# was told that its wait had failed. Which rank is named first is chance. ("Connection closed by peer" comes
# from a rank whose neighbour had given up a moment earlier.)
#
# The same as a picture: every message sets out, and none arrives.

# %% tags=["ranks"]
stuck = lesson.run_gather(lambda mine, rank, ranks: everybody_sends_first(rank), ranks, backend, timeout=2.0)
lesson.picture_of_gather(stuck, "collectives-stuck")

# %% [markdown]
# Some libraries put small messages aside and let `send` return at once. There the same mistake passes every
# small test, and shows with large tensors only.
#
# The remedy is `dist.isend`. It *starts* to send and returns at once, with a handle. Receive in the meantime;
# then the handle's `wait()` returns when the message has left.

# %%
def everybody_starts_to_send(rank):
    mine, arrived = torch.tensor([rank]), torch.tensor([-1])
    sending = dist.isend(mine, (rank + 1) % ranks)
    dist.recv(arrived, (rank - 1) % ranks)
    sending.wait()
    return arrived.item()

# %%
print("each rank received the number of:", launch(everybody_starts_to_send, ranks, backend=backend))

# %% [markdown]
# ## Write an all_gather
#
# Now all rounds. Your function runs on every rank. It gets this rank's piece, its number, and how many ranks
# there are. It returns a list with all pieces, in the order of ranks. Use `dist.isend`, `dist.recv` and
# `wait()`, and send to the next rank only.
#
# *Medium · 10 minutes · required*

# %% tags=["stub"]
def ring_all_gather(mine, rank, ranks):
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    pieces[rank] = mine
    return ...  # your rounds go before this line; then return pieces

# %% [markdown]
# Here are the messages that your function sent. Where one brings its receiver nothing new, the first such
# message is red. Where nobody receives it, its arrow is broken.

# %% tags=["ranks"]
mine = lesson.run_gather(ring_all_gather, ranks, backend)
lesson.picture_of_gather(mine)

# %%
ring.check(ring_all_gather)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def ring_all_gather(mine, rank, ranks):
#     pieces = [torch.empty_like(mine) for _ in range(ranks)]
#     pieces[rank] = mine
#     for step in range(ranks - 1):
#         sending = dist.isend(pieces[(rank - step) % ranks], (rank + 1) % ranks)
#         dist.recv(pieces[(rank - step - 1) % ranks], (rank - 1) % ranks)
#         sending.wait()
#     return pieces
# ```
#
# </details>

# %% [markdown]
# ## Sums travel, too
#
# Training needs a sum: each rank has a gradient of its own data, and all need the sum of them. That call is
# **all_reduce**. How would you do it with a ring?
#
# In two halves. First each rank ends up with *one* piece of the sum: this half is a collective of its own,
# **reduce_scatter**. Piece 0 is to end at rank 0, so it sets out from rank 1 and goes all the way round. Each
# rank on its way adds its own numbers. So does every other piece. Here is the code; compare it with yours.

# %%
print(inspect.getsource(lesson.ring_reduce_scatter))

# %% [markdown]
# Then everybody has one finished piece, and everybody wants all. You know that one: the second half is the
# all_gather that you have just written.

# %% tags=["ranks"]
gather = ring.accepted_or(lesson.ring_all_gather)
def all_reduce(pieces, rank, ranks):
    my_sum = lesson.ring_reduce_scatter(pieces, rank, ranks)
    return gather(my_sum, rank, ranks)

total = lesson.run_sum(all_reduce, ranks, backend)

# %% [markdown]
# Move the slider through its rounds. A number on an arrow says which piece travels, and a number in a strip
# how many ranks are in the sum. In the first half colours deepen: the sums grow. In the second half finished
# sums (bold frames) are handed on.

# %%
lesson.explore_sum(total, live=widgets)

# %% [markdown]
# Is it the sum that PyTorch's own `all_reduce` finds? Compare on every rank. (All numbers here are small and
# whole, so that no sum is rounded. A later lesson looks at rounding.)

# %%
def compare(rank):
    pieces = lesson.my_pieces(rank, ranks)
    torchs_own = torch.cat(pieces)
    dist.all_reduce(torchs_own)
    return torch.equal(torch.cat(all_reduce(pieces, rank, ranks)), torchs_own)

print("the same bits on every rank:", all(launch(compare, ranks, backend=backend)))

# %% [markdown]
# ## Half each
#
# Now count. The left column adds up the messages that rank 0 really sent. The right column is a formula that
# the rest of the course uses: in a ring of P ranks, each sends (P − 1)/P of the whole tensor (all pieces
# together), and in an all_reduce it does so twice.

# %%
mine = lesson.run_gather(gather, ranks, backend)
print(lesson.say_bytes(mine, total))

# %% [markdown]
# So all_reduce = reduce_scatter + all_gather, half the bytes each. That is why ZeRO sends no more bytes.
# Without it there is an all_reduce of the gradient in each step. With it a rank needs only *one* piece of the
# sum. It stops after the first half, works on that piece, and spends the second half on sending the result.
# Muon will do just that.
#
# These are the bytes of a ring, and GPUs mostly use rings. The library between your processes here, Gloo,
# takes other ways for some calls. A later lesson puts both side by side.
#
# ## Against the clock
#
# The rounds above are an order, not a time. Here are the messages of your all_gather as the clock saw them.
# Where ranks must share cores, some arrows are long: the receiver was not running.

# %% tags=["volatile"]
lesson.picture_of_clock(mine)

# %% [markdown]
# What does one message take? It has a price for setting out, however small it is, its **latency**. And it has
# a price for each byte: **bandwidth** says how many bytes pass in a second. To measure both, a ball goes from
# rank 0 to rank 1 and back, in many sizes; the fastest of some throws counts.

# %%
sizes = [4**power for power in range(1, 13)]
def there_and_back(rank, ball):
    for turn in (0, 1):
        dist.send(ball, 1 - rank) if rank == turn else dist.recv(ball, 1 - rank)

def ping_pong(rank):
    balls = [torch.zeros(size // 4) for size in sizes]
    return [lesson.fastest(4 * steps, there_and_back, rank, ball) / 2 for ball in balls]

# %% tags=["volatile"]
seconds = launch(ping_pong, 2, backend=backend)[0]
wire = lesson.fit_wire(sizes, seconds)
print(lesson.say_wire(wire, sizes, seconds))

# %% tags=["volatile"]
lesson.picture_of_wire(wire, sizes, seconds)

# %% [markdown]
# To the left the line is flat: a small message takes its latency, and bytes are free. To the right it climbs:
# only bytes count. (A dot far above the line: the machine was busy with something else.) So many small
# matrices should travel as one large buffer. Optimizers call it a bucket, and lesson 05 is about it.
#
# ## Recap
#
# - A collective is a call that all ranks make. Inside are messages between neighbours.
# - If all send first and nobody receives, all wait for ever: a deadlock. Start to send, receive, then wait.
# - all_reduce = reduce_scatter + all_gather, half the bytes each.
# - A message costs latency, and bytes divided by bandwidth.
#
# **Quiz.** Answer with numbers. You can measure each of them with one line above.
#
# 1. `rounds`: how many rounds does the all_reduce take?
# 2. `share`: what part of the all_reduce's bytes does the all_gather send?
# 3. `bytes`: how many bytes does rank 0 send in the all_reduce?

# %%
quiz = lesson.quiz(ranks)

# %% tags=["stub"]
answers = {"rounds": ..., "share": ..., "bytes": ...}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# sent = total.bytes_sent(0)
# answers = {"rounds": total.messages_sent(0), "share": mine.bytes_sent(0) / sent, "bytes": sent}
# ```
#
# </details>
