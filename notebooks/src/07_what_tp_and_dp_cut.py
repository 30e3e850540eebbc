# %% [markdown]
# # 07 · What do tp and dp cut?
#
# A model's weights and its optimizer's memory are spread over a grid of ranks. Which ranks hold a given entry, and
# what shape is each rank's piece?

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
from muon_tutorial.learn import cuts as lesson
lesson.hero()

# %% [markdown]
# <details><summary>About this lesson: minutes, what you need, previous and next, Colab</summary>
#
# **Sixty-five minutes.** The optional exercises take thirty-one more. At the end you can say, for any Linear, any grid and
# either cut, what shape a rank holds and which rank holds which entries. Your own cuts have moved bytes on real
# ranks, and you know why q, k and v have to be cut one by one.
#
# *You need* lesson 05 (a rank owns a range) and lesson 06 (the grid and its groups).
#
# - *Previous:* [06 · Which ranks belong together?](06_the_grid.ipynb)
# - *Next:* [08 · What happens if each shard is orthogonalized alone?](08_each_shard_alone.ipynb)
# - *Words and symbols:* [glossary](GLOSSARY.md)
# - *In Colab:* upload this lesson's self-contained copy, which `python scripts/pack.py 07` makes. Colab
#   deletes your `my_muon.py` when you leave: download it, and upload it where you go on.
#
# *Other grids:* any.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2
tp: int = 3
steps: int = 3
seed: int = 0
backend: str = "gloo"
widgets: bool = True

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from muon_tutorial import Muon, build_mesh, launch
from muon_tutorial.learn import cuts as lesson, my_muon
from muon_tutorial.learn.cuts import on_ranks as work
from muon_tutorial.learn.widgets.reveal import compare
guess, shapes, layers, backward, tokens, holders, tearing, fused, quiz = lesson.all_exercises(dp, tp, backend)
_ = my_muon.so_far("07")

# %% [markdown]
# ## Outputs, or inputs?
#
# A Linear keeps its weight W as `(out, in)` and computes y = x Wᵀ. tp can cut W in two ways:
#
# - **Column parallel**: a rank computes *some outputs*, so it needs *rows* of W. Dimension 0 is cut, `W[I_tp, J]`.
# - **Row parallel**: a rank takes *some inputs*, so it needs *columns* of W. Dimension 1 is cut, `W[I, J_tp]`.
#
# <details><summary>Yes, column parallel cuts rows. Why is it called that?</summary>
#
# The names come from papers that write y = x A, and their A is Wᵀ. So ask: outputs, or inputs?
#
# </details>

# %%
lesson.explore(dp, tp, live=widgets)

# %% [markdown]
# As in `torch.chunk`, each rank takes size / tp rows or columns, rounded up, until none are left. W is 10 × 8. What
# shape is the last rank's piece, cut either way?
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
column_parallel = ...  # a pair (rows, columns)
row_parallel = ...

# %%
guess.check(column_parallel, row_parallel)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# column_parallel = (max(0, 10 - (tp - 1) * -(-10 // tp)), 8)
# row_parallel = (10, max(0, 8 - (tp - 1) * -(-8 // tp)))
# ```
#
# </details>

# %% [markdown]
# ## Any piece of any Linear
#
# Write a function for any piece's shape.
#
# <details><summary>Hint</summary>
#
# `-(-n // tp)` rounds up. How many are left when the ranks before this one have taken theirs? The
# number may be negative, but a piece has at least 0.
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def local_shape(shape, kind, tp_rank, tp):
    # the shape of a rank's piece; kind is "column" or "row"
    out, into = shape  # of the whole weight
    return ...  # a pair (rows, columns)

# %%
shapes.check(local_shape)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `max(0, …)` is for the last ranks. If seven ranks share ten rows, five of them take two each, and the last one would
# come out at −2.
#
# ```python
# def local_shape(shape, kind, tp_rank, tp):
#     out, into = shape
#     n = out if kind == "column" else into
#     step = -(-n // tp)  # rounded up
#     mine = max(0, min(step, n - step * tp_rank))
#     return (mine, into) if kind == "column" else (out, mine)
# ```
#
# </details>

# %% [markdown]
# ## Two layers, one message
#
# An MLP has two layers with relu between. `up`, 10 × 8, is column parallel, so each rank finishes some hidden
# features and can apply relu at once. `down`, 6 × 10, is row parallel, and each rank's piece needs just that rank's
# features. So no message passes between the layers. But each rank has only a part of every sum, `y{U_tp}`. Write one
# rank's forward pass.
#
# <details><summary>Hint</summary>
#
# Both layers are `x @ W.T`, whether W is whole or a piece. Which collective of lesson 03 gives every rank the sum?
#
# </details>
#
# *Medium · 6 minutes · required*

# %% tags=["stub"]
def both_layers(x, up, down, tp_group):
    # x: the batch of this rank's row of the grid; up, down: this rank's pieces
    hidden = ...
    y = ...
    return ...  # the whole y

# %%
layers.check(both_layers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# relu may come before the sum, because after `up` each rank has whole features. After `down` it has only a summand of
# each output, and a sum of relus is not the relu of the sum.
#
# ```python
# def both_layers(x, up, down, tp_group):
#     hidden = torch.relu(x @ up.T)
#     y = hidden @ down.T
#     dist.all_reduce(y, group=tp_group)
#     return y
# ```
#
# </details>

# %% [markdown]
# The check used small whole numbers, so no sum was rounded. With ordinary numbers, does the output have the same bits
# as in one process?
#
# *Easy · 1 minute · required*

# %% tags=["stub", "predict"]
same_bits = ...  # True or False

# %%
shape_of = shapes.accepted_or(lesson.local_shape)
both_layers = layers.accepted_or(lesson.both_layers)
def on_my_pieces(rank, given):
    tp_group = build_mesh({"dp": dp, "tp": tp}).get_group("tp")
    up = work.cut(given.up, "column", rank % tp, tp, shape_of)
    down = work.cut(given.down, "row", rank % tp, tp, shape_of)
    return both_layers(given.batches[rank // tp], up, down, tp_group)

# %% tags=["answer"]
for kind in ("whole", "ordinary"):
    given = work.make_numbers(kind, dp, seed)
    outputs = launch(on_my_pieces, dp * tp, args=(given,), backend=backend)
    run = lesson.LayersRun(dp, tp, given, tuple(outputs))
    print(lesson.say_layers(run, kind))
compare({"same_bits": same_bits}, {"same_bits": run.same_bits()})

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# same_bits = tp == 1
# ```
#
# </details>

# %% [markdown]
# The ranks add the same products in another order, and each addition rounds.
#
# ## What dp cuts
#
# dp copies the weights. For each place along tp, the momentum is one flat buffer (lesson 05), and dp cuts it into
# equal slices, no matter where a matrix begins. So tp cuts a *matrix*, and dp the *buffer*. Every rank leaves room
# for a matrix's largest piece, so the next matrix begins at the same offset everywhere.

# %%
lesson.picture_of_buffers(dp, tp)

# %% [markdown]
# Which ranks hold the weight `up[row, column]`, and which one keeps its momentum?
#
# <details><summary>Hint</summary>
#
# First find the tp coordinate and the row within the piece, with one `divmod`. The weight is on all ranks with that
# coordinate. For the momentum, how many entries of the piece stand before this one?
#
# </details>
#
# *Medium · 8 minutes · required*

# %% tags=["stub"]
def who_holds(row, column, dp, tp, length):
    # up is 10 × 8, column parallel; a rank's piece of it comes first in the buffer, row by row;
    # dp cuts the buffer into slices of `length` entries
    weight_on = ...    # a list of ranks
    momentum_on = ...  # one rank
    return ...         # weight_on, momentum_on

# %%
holders.check(who_holds)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Divide by the rows of the first piece, and not by 10 / tp: the last piece may be shorter, but every piece begins at
# a multiple of the first one's rows.
#
# ```python
# def who_holds(row, column, dp, tp, length):
#     most = -(-10 // tp)  # rows of the first piece
#     tp_rank, my_row = divmod(row, most)
#     weight_on = [dp_rank * tp + tp_rank for dp_rank in range(dp)]
#     momentum_on = (my_row * 8 + column) // length * tp + tp_rank
#     return weight_on, momentum_on
# ```
#
# </details>

# %% [markdown]
# Muon needs whole matrices. The momentum stays on its rank, but from it each rank makes its part of Newton–Schulz's
# input, and two gathers join these parts:
#
# ```text
# over dp, the slices of a buffer              x[B_dp]    → x[B]
# over tp, the pieces of a matrix (columns)    X[I, J_tp] → X[I, J]
# ```
#
# ## Three matrices in one
#
# Many models stack attention's weights, q above k above v: a **fused QKV**. Its rows belong to **attention heads**. A
# head works with its own rows of all three, so it needs them on *one* rank. It is torn if no rank has them all. How
# many are torn if tp cuts the rows of the stack as one weight? And how many if it cuts q, k and v one by one?
#
# <details><summary>Hint</summary>
#
# If tp cuts rows, row r is on rank r // step, where `step` is the first piece's number of rows. If q, k and v are
# stacked, a head has a run of rows in each third of the stack: where are the first and the last row of each run? If
# each is cut by itself, all three have a head's rows on the same ranks, so one third is enough.
#
# </details>
#
# *Medium · 7 minutes · required*

# %% tags=["stub"]
def torn(heads, rows, tp, stacked):
    # rows: of one head, in each of q, k and v; stacked: True if all three are cut as one, False if one by one
    return ...  # how many heads

# %%
tearing.check(torn)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A run of rows is whole if its first and its last row are on the same rank. But stacked, a head can be torn although
# each of its three runs is whole: all three must lie on the *same* rank. As soon as tp cuts, they never do, because
# q and v of a head are two thirds of all rows apart.
#
# ```python
# def torn(heads, rows, tp, stacked):
#     thirds = 3 if stacked else 1
#     step = -(-thirds * heads * rows // tp)
#     count = 0
#     for head in range(heads):
#         firsts = [(third * heads + head) * rows for third in range(thirds)]
#         ranks = {row // step for first in firsts for row in (first, first + rows - 1)}
#         count += len(ranks) > 1
#     return count
# ```
#
# </details>

# %%
lesson.slide_qkv(live=widgets)

# %% [markdown]
# If tp cuts the stack as one weight, every head is torn, though every shape is correct and no error is raised. If it
# cuts one by one, heads are torn only if tp does not divide their number.
#
# <details><summary>This has happened</summary>
#
# Code that looks for q, k and v in a *piece*, by its number of rows, goes wrong without an error. Pull request 7117
# of NVIDIA/Megatron-LM (2026) repaired such a case: with the weight cut over many ranks, Muon orthogonalized q, k and
# v as one matrix. The whole update was 26 percent off, and its rows of k and v 95 percent. On 256 GPUs the training
# loss ended 0.17 percent higher, and the only sign of it was a line in the debug log.
#
# </details>
#
# ## Keep every head whole
#
# Deal out whole heads, so that no rank carries more than it must.
#
# <details><summary>Hint</summary>
#
# `W.reshape(3, heads, -1, W.shape[1])` has a dimension for q, k and v and one for the heads. `tensor_split` deals out
# heads as evenly as possible. On the way back, each piece splits into three again.
#
# </details>
#
# *Hard · 15 minutes · optional · par 144 entries on the busiest rank*

# %% tags=["stub", "hard"]
def shard_qkv(W, heads, tp_rank, tp):
    return ...  # this rank's piece, again q above k above v, made of whole heads

def join_qkv(pieces, heads):
    return ...  # W, from all pieces in order

# %%
fused.check(shard_qkv, join_qkv)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# `tensor_split` always makes tp parts, while `chunk` rounds the size of a part up and may run out of heads before the
# last rank. On the way back, all q parts come first, then all k parts, then all v parts.
#
# ```python
# def shard_qkv(W, heads, tp_rank, tp):
#     mine = torch.arange(heads).tensor_split(tp)[tp_rank]
#     by_head = W.reshape(3, heads, -1, W.shape[1])  # q, k and v × heads × rows × in
#     return by_head[:, mine].reshape(-1, W.shape[1])
#
# def join_qkv(pieces, heads):
#     parts = [piece.tensor_split(3) for piece in pieces]
#     return torch.cat([part[number] for number in range(3) for part in parts])
# ```
#
# </details>

# %%
shard_qkv, join_qkv = fused.accepted_or((lesson.shard_qkv, lesson.join_qkv))
def there_and_back(rank, W):
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, shard_qkv(W, lesson.HEADS, rank, len(pieces)))
    return [len(piece) for piece in pieces], join_qkv(pieces, lesson.HEADS)

# %%
W = lesson.fused_weight(seed)
back = launch(there_and_back, 3, args=(W,), backend=backend)
print("rows on each rank:", back[0][0])
print("whole again, to the bit, on every rank:", all(torch.equal(W, joined) for _, joined in back))

# %% [markdown]
# ## Optional: the way back
#
# `both_layers` has no backward pass yet: autograd does not see what `dist.all_reduce` adds up. Every rank of a tp group
# has the whole y, so it also has dy, the loss's gradient of y. From it, a rank's own pieces give dx, d_up and d_down.
# Which of these are as in one process with this row's tokens, and which must be summed, over which group?
#
# <details><summary>Hint</summary>
#
# For y = x Wᵀ, the gradients are dx = dy W and dW = dyᵀ x. relu lets a gradient pass where the feature is positive.
# Now follow x: it went into every rank's piece of `up`. Does any other rank use this rank's pieces?
#
# </details>
#
# *Medium · 8 minutes · optional*

# %% tags=["stub"]
def both_backward(x, up, down, tp_group, dp_group, dy):
    # x, up, down: as in both_layers; dy: the same on all ranks of tp_group
    hidden = torch.relu(x @ up.T)
    d_down = ...
    d_hidden = ...
    d_up = ...
    dx = ...
    return dx, d_up, d_down

# %%
backward.check(both_backward)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# A rank's hidden features come from its rows of `up` and go into its columns of `down`, and no other rank has these. So
# its d_up and d_down are whole, and nothing is sent for them along tp. But each rank of the group has read all of x,
# and knows only what its own features do to the loss. Its dx is a summand:
#
# ```text
# T tokens, J inputs: dx[T, J]{U_tp} → dx[T, J]     all_reduce over tp
# ```
#
# Forward ends with an all_reduce, and backward ends with one, too. It is tempting to sum the weights' gradients over
# dp at once. They need that sum, but Muon's step makes it for the whole buffer (lesson 05).
#
# ```python
# def both_backward(x, up, down, tp_group, dp_group, dy):
#     hidden = torch.relu(x @ up.T)
#     d_down = dy.T @ hidden
#     d_hidden = (dy @ down) * (hidden > 0)
#     d_up = d_hidden.T @ x
#     dx = d_hidden @ up
#     dist.all_reduce(dx, group=tp_group)
#     return dx, d_up, d_down
# ```
#
# </details>

# %% [markdown]
# ## Optional: do not keep what others keep
#
# After `both_layers` comes a norm or a dropout. All ranks of a tp group hold the same y there, so they keep the same
# activations for backward. With sequence parallelism, each rank has only some tokens (rows of x) before the layers,
# and only their y after them. Write its forward pass.
#
# <details><summary>How much that saves</summary>
#
# A rank keeps 1 / tp of these activations ([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198)). In a model x
# and y are equally wide. Then a rank sends as many bytes as before.
#
# </details>
#
# <details><summary>Hint</summary>
#
# An all_reduce is a reduce_scatter and an all_gather (lesson 03), and other work fits in between. Which of the two
# comes before `up`, and which one after `down`? `dist.reduce_scatter(mine, pieces, group=tp_group)` sums `pieces`, a
# list with one tensor for each rank of the group, and leaves this rank's sum in `mine`.
#
# </details>
#
# *Medium · 8 minutes · optional*

# %% tags=["stub"]
def both_layers_sp(x, up, down, tp_group):
    # x: this rank's tokens, as many as every other rank of tp_group has; up, down: this rank's pieces
    return ...  # the whole y of the same tokens

# %%
tokens.check(both_layers_sp)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Each rank computes other hidden features, and needs all tokens for them. After `down` it has a summand of every token's
# y, and keeps the sums of its own tokens only. You could also all_reduce y and drop the other tokens, but that would
# send twice as much after `down`.
#
# ```python
# def both_layers_sp(x, up, down, tp_group):
#     parts = [torch.empty_like(x) for _ in range(tp_group.size())]
#     dist.all_gather(parts, x, group=tp_group)
#     y = torch.relu(torch.cat(parts) @ up.T) @ down.T
#     mine = torch.empty_like(y[: len(x)])
#     dist.reduce_scatter(mine, list(y.split(len(x))), group=tp_group)
#     return mine
# ```
#
# </details>

# %% [markdown]
# <details><summary>A build of two and a half hours, without a stub: context parallelism</summary>
#
# Context parallelism (cp) cuts long sequences. Its ranks hold the same weights and different tokens, so to Muon cp is
# more dp: gradients are averaged over dp × cp, and ZeRO-1 may cut its buffer over both (`cp_pg` in
# `help(muon_tutorial.create_processgroup_config)`).
#
# Beside your `ring.py`, `python -m muon_tutorial.learn.builds context` writes `test_context.py`. Write `context.py`
# until it is green.
#
# 1. `attention(q, k, v, rank, ranks)` gets a rank's tokens (heads × tokens × width) and returns what torch's
#    `scaled_dot_product_attention` gives them in the whole sequence.
# 2. A sixth argument, `at`, makes it causal: `at[r]` has the positions of rank r's tokens. Skip what no token may see.
# 3. Keys travel on your ring; a rank never holds those of more than two others.
# 4. `backward` works, too, with the same limit.
# 5. `positions(rank, ranks, tokens)` chooses tokens so that causal work is even.
#
# </details>
#
# <details><summary>A hint for the build: a softmax, block by block</summary>
#
# For each query, keep the largest score so far, and the sum of exp(score − largest). When a block brings a larger
# score, what must happen to this sum, and to the output so far?
#
# </details>
#
# <details><summary>A hint for the build: gradients</summary>
#
# Write a `torch.autograd.Function`. If you keep each query's denominator, backward can compute any block's weights
# again. The gradient of a score is its weight times (d_out · v − d_out · out). Every rank adds a term to the gradient
# of a key: where should the sum be when the next rank adds its own, and where when all have?
#
# </details>
#
# <details><summary>A solution of the build, and why it is so</summary>
#
# It is `muon_tutorial/learn/builds/reference/context.py`. It keeps the logarithm of the denominator, and `logaddexp`
# does the work of the largest score. It is tempting to average the softmaxes of all blocks, but a block counts as
# much as its part of the denominator. It is also tempting to write a send that autograd can differentiate: then every
# block that came by waits for backward, and each rank holds all keys again. Here forward sends P − 1 blocks. In
# backward they travel once more, and their gradients go one rank further, home: 3P − 2 in all.
#
# With tokens in order, the last rank multiplies P pairs of blocks and rank 0 only one. Cut the sequence into 2P pieces
# and give rank r pieces r and 2P − 1 − r, an early and a late one: then every rank multiplies (P + 1) / 2. [Llama
# 3](https://arxiv.org/abs/2407.21783) cuts its sequences like this, but gathers all keys at once, because its keys have
# far fewer heads than its queries.
#
# </details>

# %% [markdown]
# ## Recap
#
# <details><summary>Say it in your own words first, then compare</summary>
#
# - Column parallel cuts the rows of W, which are its outputs. Row parallel cuts its columns, which are its inputs.
# - tp cuts a *matrix*. The size of a piece is rounded up, so the last one may be small, or empty.
# - dp copies the weights and cuts the *buffer* of the momentum, no matter where a matrix begins.
# - A column parallel layer and then a row parallel one need one all_reduce together.
# - A fused QKV is three matrices. Cut each of them, and by whole heads.
#
# </details>
#
# **Quiz.**
#
# *Easy · 2 minutes · required*

# %% tags=["stub"]
answers = {
    "columns": ...,  # how many columns of down, 6 × 10 and row parallel, does the last rank hold?
    "kept": ...,  # how many entries of up's and down's momentum does rank 0 keep, with padding?
    "torn": ...,  # of 4 heads with 3 rows each in q, k and v: how many are torn at tp = 3, cut one by one?
}

# %%
quiz.check(answers)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Each rank takes `most` columns of down until none are left. The buffer has room for the largest piece of both weights,
# and dp cuts it, rounded up. At tp = 3 each of q, k and v is cut after its 4th and its 8th row. Heads end after the 3rd,
# the 6th and the 9th, so both cuts fall inside a head, and in all three matrices it is the same head.
#
# ```python
# most = -(-10 // tp)  # rows of up, columns of down
# columns = max(0, min(most, 10 - most * (tp - 1)))
# kept = -(-(most * 8 + 6 * most) // dp)
# answers = {"columns": columns, "kept": kept, "torn": 2}
# ```
#
# </details>

# %% [markdown]
# ## Your cuts, in training
#
# Each row of the grid trains on its own data. `my_parameters` cuts the weights with your function, and tells Muon
# along which dimension:

# %%
def train(rank):
    weights = work.my_parameters(rank, tp, seed, shape_of)
    optimizer = Muon(weights, strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}))
    for step in range(steps):
        work.fill_gradients(weights, rank, tp, step)
        optimizer.step()
    return work.kept_by(optimizer)

kept = launch(train, dp * tp, backend=backend)

# %%
who_holds = holders.accepted_or(lesson.who_holds)
weight_on, momentum_on = who_holds(7, 2, dp, tp, lesson.slice_length(dp, tp))
print(f"up[7, 2] is on ranks {weight_on}; rank {momentum_on} keeps its momentum")

# %% [markdown]
# After training, which ranks hold the same weights as rank 0, to the bit?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
alike = ...  # a list of ranks, with rank 0, such as [0, 1]

# %% tags=["answer"]
same = [rank for rank, it in enumerate(kept) if all(map(torch.equal, it.weights, kept[0].weights))]
compare({"alike": alike}, {"alike": same}, lesson.picture_of_kept(dp, tp, kept))

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# Ranks in one column hold the same piece. Each slice of its new weights is computed on one of them, and all_gather
# copies it to the others.
#
# ```python
# alike = list(range(0, dp * tp, tp))
# ```
#
# </details>

# %% [markdown]
# The next lesson asks what happens if each rank orthogonalizes its piece alone.
#
# *Read on:* [When dp or tp pays off](https://jax-ml.github.io/scaling-book/training)
