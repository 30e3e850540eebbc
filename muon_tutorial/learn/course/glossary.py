"""The words and symbols that all lessons share: one sentence each, and the lesson that introduces them."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from . import series


@dataclass(frozen=True, slots=True)
class Term:
    """A word, its meaning, and the lesson that sets it in bold; ``bold`` is its form there, if different."""

    word: str
    lesson: str
    meaning: str
    bold: str = ""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol or short name in formulas, code and pictures, its meaning, and the lessons that use it."""

    sign: str
    lessons: tuple[str, ...]
    meaning: str


_TERMS = """\
process | 00 | A running program with its own memory. No other process can look into it.
rank | 00 | The number of a process among those that train together. Also that process itself.
tp | 00 | Tensor parallel: the axis of the grid along which a weight is cut, by columns or by rows.
dp | 00 | Data parallel: the axis along which a weight is copied. Each rank along it sees different data.
layout | 00 | Who holds what of a tensor. W[I, J_tp]: tp cuts the columns; an axis not named holds copies.
momentum | 00 | A running average of past gradients, as large as the weight.
ZeRO | 00 | A way to save memory: the optimizer's state is cut along dp, so no two ranks keep the same part.
must call | 00 | Ranks that must call a function wait for each other in it: if one stays away, the rest hang.
orthogonalize (orthogonalizes) | 00 | To keep a matrix's directions and make all equally loud: UVᵀ in place
    of U S Vᵀ.
singular values | 01 | One number for each direction of a matrix: how loud it is, or how far it stretches an
    input.
SVD | 01 | Singular value decomposition: takes a matrix apart into directions and singular values, U S Vᵀ.
spectrum | 01 | All singular values of a matrix, sorted.
energy | 01 | The square of a singular value. All energies add up to the sum of the squares of all entries.
SGD | 01 | The plainest optimizer: the update is the gradient.
Adam | 01 | An optimizer: divides each entry of the gradient by its usual size. AdamW also shrinks weights.
Muon | 01 | The optimizer of this course: orthogonalizes the update of each hidden matrix.
size factor | 01 | The root of rows / columns of a weight, at least 1: Muon multiplies its update with it.
weight decay | 01 | To shrink a weight a little in each step. Decoupled: the gradient has no part in it.
embedding | 01 | A model's first matrix. An input, here a byte, picks one of its rows.
head | 01 | A model's last matrix. It gives a score to each possible output.
par | 01 | Of an exercise, as in golf: the number that a good answer needs. Less is better.
RMS | 01 | Root mean square: the usual size of an entry.
Newton–Schulz | 02 | A way to orthogonalize by matrix products alone. In a few steps it brings singular
    values near 1.
Frobenius norm | 02 | The root of the sum of the squares of all entries of a matrix.
step | 02 | Of Newton–Schulz: three matrix products that move every singular value s to a s + b s³ + c s⁵.
FLOPs | 02 | Floating-point operations. A product of p × q with q × r takes 2 p q r of them.
bfloat16 | 02 | Numbers of 16 bits, with the range of float32 and two to three digits.
collective | 03 | A call that all ranks of a group make together, and that tells each of them something.
all_gather | 03 | A collective: each rank brings one piece, and all leave with all pieces.
all_reduce | 03 | A collective: each rank brings a tensor, and all leave with the sum.
reduce_scatter | 03 | A collective: each rank brings a tensor and leaves with one piece of the sum.
ring | 03 | An order for messages: each rank sends to the next, and the last one to rank 0.
tree | 03 | Messages that branch: each round, twice as many ranks have a part in them as in the last.
round | 03 | Messages that can travel at the same time, one from each rank.
deadlock | 03 | Each rank waits for another one that is waiting, too. It never ends by itself.
latency | 03 | The time that a message takes however small it is.
bandwidth | 03 | How many bytes pass in a second, once a message is on its way.
owner | 04 | Of a matrix: the one rank that orthogonalizes it for all.
round robin | 04 | To deal out in turn: matrix i belongs to rank i modulo dp.
flat buffer | 04 | A row of entries with a place for each matrix, one after the other.
makespan | 04 | The work of the busiest rank. All others wait for it.
ZeRO-1 | 05 | The first form of ZeRO: only the optimizer's memory is cut along dp, and weights stay copies.
bucket | 05 | Matrices one after the other in a flat row of entries, which travel together.
padding | 05 | Entries that mean nothing. They fill a length up until dp divides it.
straddles | 05 | A matrix straddles if a boundary between slices cuts it: several ranks keep parts of it.
virtual buffer | 05 | All buckets in a row: an address book that says where each entry would be. No rank
    keeps it whole.
coordinates | 06 | Where a rank stands: its place along dp and its place along tp, each from 0.
group | 06 | A set of ranks that call a collective together.
dp group | 06 | A column of the grid: its ranks hold the same piece and see different data.
tp group | 06 | A row of the grid: its ranks hold different pieces, which make a whole matrix.
device mesh | 06 | PyTorch's record of a grid. It makes all groups of the grid at once.
global rank | 06 | A rank's number among all ranks of a run.
group rank | 06 | A rank's number within one of its groups, from 0.
column parallel | 07 | A way to cut a Linear: each rank makes some outputs. It cuts dimension 0, the
    weight's rows.
row parallel | 07 | A way to cut a Linear: each rank takes some inputs. It cuts dimension 1, the weight's
    columns.
fused QKV | 07 | The weights q, k and v of attention in one matrix, q above k above v.
attention head (attention heads) | 07 | Some rows of q, k and v that work together, without the other heads.
shard | 08 | The piece of a matrix that one rank holds.
cosine | 08 | Of two matrices: 1 if they point the same way, 0 if they are at right angles.
distance | 08 | From UVᵀ: the size of the difference, divided by the size of UVᵀ.
phase (phases) | 09 | One of the seven parts of a distributed step.
generator | 09 | A function with `yield`, where it stands still until someone sends it an answer.
stepping world | 09 | All ranks in one process, as generators, so that one can stop between any two
    messages.
route | 09 | The hops by which a matrix gets from where it is kept to where it is whole.
hop (hops) | 09 | One change of how one axis holds a tensor, such as cut → whole on all.
ledger | 10 | A list of every request of a step, in bytes.
ZeRO-3 | 11 | The third form of ZeRO: weights and gradients are cut, too, and a layer is gathered to be used.
FSDP2 | 11 | PyTorch's `fully_shard`: it cuts each parameter along dp, and gathers it
    for the moment it is used.
empty shard | 11 | The shard of a rank for which no row was left. The rank still makes all calls, with empty
    tensors.
HSDP | 11 | FSDP2 within each replica: the ranks of a replica hold the whole model between them.
expert parallel | 11 | Each rank, or each group of ranks, holds experts that no other holds.
asynchronous | 12 | A call is asynchronous if it hands work over and returns before that work is done.
ticket | 12 | What an asynchronous request gives back at once. Waiting for it brings the answer.
overlap | 12 | To compute while something travels, so that one hides the time of the other.
exposed | 12 | Communication is exposed if a rank waits for it, because no computation hides it.
prefetch | 12 | To ask for data that a later computation needs, before computing with the data at hand.
window | 12 | How many matrices or buckets a rank may have asked for and not yet finished.
timed world | 12 | Ranks as generators, each with a clock; work and messages cost what a machine's file
    says, and nothing is sent.
stage | 12 | In a pipeline: a rank, or several, with consecutive layers of the model.
micro-batch (micro-batches) | 12 | A small part of a batch, which goes through a pipeline by itself.
1F1B | 12 | An order for pipelines: each stage begins with few forwards, then does one backward before each
    other forward.
bus | 12 | One link that all ranks share. While one of them sends, the others wait.
waterfall | 13 | A picture that leads from one number to another, one named change at a time.
like for like | 13 | A comparison in which both sides do the same work, from the same start to the same end.
annotation | 13 | A label in a trace over a stretch of time. Nothing runs because of it.
break-even | 13 | The point at which two choices cost the same.
planner | 13 | Predicts bytes, memory and seconds of a step from a plan and a machine's file; nothing runs.
floor | 14 | The time that one owner needs for the costliest matrix. No number of ranks makes a step shorter.
oracle | 15 | The same training in one process, with which the results of ranks are compared.
flight recorder | 15 | A list of each rank's latest calls, kept in memory, to be read after a hang.
DTensor | 16 | A tensor of which each rank holds a part; it knows the whole's shape and how it is cut.
scheduler | 16 | An object that changes the learning rate from step to step. It counts the steps itself.
clip | 16 | To shorten a gradient whose norm is too large. The norm is that of all parameters together.
checkpoint | 16 | Everything that a run needs to go on: model, optimizer state, and what the loop knows.
box | 16 | A rectangle of a matrix: from which row to which, and from which column to which.
torchrun | 16 | PyTorch's command that starts a process for each rank, and all again if one dies.
"""

_SYMBOLS = """\
dp, tp | 00 04 05 06 07 08 09 10 11 13 14 15 | The number of places of the grid along each axis.
rank | 00 03 08 | A rank's number. It stands at `rank // tp` along dp, `rank % tp` along tp.
steps, seed | 00 01 02 13 | The number of steps, and the seed of random numbers: parameters of the lessons.
dp_rank, tp_rank | 06 07 | A rank's coordinates: its place along dp, and along tp.
place | 05 | Where a rank stands along one axis of the grid, from 0.
W, x | 01 07 | The weight of a layer, and its input.
lr | 01 | The learning rate: what the update is multiplied with.
G | 01 08 | The gradient of one weight.
U, S, Vt | 01 02 08 | The SVD: directions of the output, singular values, directions of the input.
UVᵀ | 08 | The orthogonalized matrix; `U @ Vt` in code.
X | 02 | The matrix that Newton–Schulz works on, at first with Frobenius norm 1. After the steps it is Y.
A | 02 | `X @ X.T`, the product that a step needs twice.
a, b, c | 02 | The three numbers of a step of Newton–Schulz.
s | 01 02 | One singular value.
s, l | 02 | In a cost, the shorter and the longer side of a matrix.
m, n | 02 08 | The rows and columns of a matrix, in formulas.
in, out | 07 | The numbers of inputs and outputs of a Linear.
P | 03 10 | The number of ranks in a ring.
P₁, P₂, … | 08 | Each rank's shard, after it was orthogonalized alone.
global_range, local_range | 05 | Where a matrix lies in its bucket, and in a rank's slice.
x, route, at | 09 | A rank's tensor, the route along which it travels, and the rank's coordinates.
J_tp | 00 07 08 09 10 14 | In a layout, W[I, J_tp]: tp cuts the columns. An axis not named holds copies.
{U_dp} | 03 04 05 09 10 11 13 | Unreduced: each dp rank has a summand, and the sum is still to be taken.
@dp=k | 11 14 | Owned: the rank at place k of dp has the tensor whole, and the others have nothing.
"""


def _term(word: str, lesson: str, meaning: str) -> Term:
    """The term in a row. A word may be followed by brackets with the form that its lesson sets in bold."""
    word, _, bold = word.rstrip(")").partition(" (")
    return Term(word, lesson, meaning, bold)


TERMS = tuple(_term(*row) for row in series.rows(_TERMS))
BY_WORD = sorted(TERMS, key=lambda term: term.word.casefold())
SYMBOLS = tuple(Symbol(sign, tuple(used.split()), meaning) for sign, used, meaning in series.rows(_SYMBOLS))

_PAGE = """\
# Glossary and notation

The words and symbols that all lessons share. Each word names the lesson that introduces it in bold. In
a notebook: `from muon_tutorial.learn import glossary`, then `glossary.look_up("rank")`.

## Words

{words}

## Symbols

{symbols}
"""


@dataclass(frozen=True, slots=True)
class GlossaryEntries:
    """Words and symbols, displayed as a table in a notebook and as plain lines elsewhere."""

    terms: Sequence[Term] = ()
    symbols: Sequence[Symbol] = ()

    def __repr__(self) -> str:
        lines = [f"{term.word} (lesson {term.lesson}): {term.meaning}" for term in self.terms]
        lines += [f"{symbol.sign}: {symbol.meaning}" for symbol in self.symbols]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(filter(None, (term_table(self.terms), symbol_table(self.symbols))))


def look_up(word: str = "") -> GlossaryEntries:
    """The entry of a word or symbol; without an argument, all entries.

    Raises UsageError if there is no such entry, with entries of a similar spelling.

    >>> look_up("ring")
    ring (lesson 03): An order for messages: each rank sends to the next, and the last one to rank 0.
    """
    if not word:
        return GlossaryEntries(BY_WORD, SYMBOLS)
    wanted = word.strip().casefold()
    found = GlossaryEntries(
        [term for term in TERMS if wanted in (term.word.casefold(), term.bold.casefold())],
        [symbol for symbol in SYMBOLS if word.strip() in symbol.sign.split(", ")],
    )
    if found.terms or found.symbols:
        return found
    known = [term.word for term in TERMS]
    near = difflib.get_close_matches(wanted, known) or [each for each in known if wanted in each]
    advice = f"did you mean {', '.join(map(repr, near))}?" if near else "look_up() shows all words"
    raise UsageError(f"the glossary has no {word!r}; {advice}")


def page() -> str:
    """The whole text of ``GLOSSARY.md``, which lies next to the notebooks."""
    return _PAGE.format(words=term_table(BY_WORD, _linked), symbols=symbol_table(SYMBOLS, _linked))


def term_table(terms: Sequence[Term], number: Callable[[str], str] = str) -> str:
    """Terms as a Markdown table; ``number`` writes a lesson's number. Empty without terms."""
    rows = [f"| {term.word} | {term.meaning} | {number(term.lesson)} |" for term in terms]
    return "\n".join(["| word | meaning | lesson |", "|---|---|---|", *rows]) if rows else ""


def symbol_table(symbols: Sequence[Symbol], number: Callable[[str], str] = str) -> str:
    """Symbols as a Markdown table; ``number`` writes a lesson's number. Empty without symbols."""
    rows = [
        f"| `{symbol.sign}` | {symbol.meaning} | {', '.join(map(number, symbol.lessons))} |"
        for symbol in symbols
    ]
    return "\n".join(["| symbol | meaning | lessons |", "|---|---|---|", *rows]) if rows else ""


def _linked(number: str) -> str:
    return series.link(series.lesson(number), number)
