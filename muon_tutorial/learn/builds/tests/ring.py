import torch

from muon_tutorial.learn import builds


def pieces_of(rank, ranks):
    return [torch.arange(6, dtype=torch.float64).view(2, 3) + 100 * rank + 10 * n for n in range(ranks)]


def calls(rank, ranks):
    import ring  # yours: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all

    pieces = pieces_of(rank, ranks)
    call = {"all_gather": lambda: ring.all_gather(pieces[0], rank, ranks)}
    call["reduce_scatter"] = lambda: [ring.reduce_scatter(pieces, rank, ranks)]
    call["all_reduce"] = lambda: ring.all_reduce(pieces, rank, ranks)
    call["all_to_all"] = lambda: ring.all_to_all(pieces, rank, ranks)
    for root in range(ranks):
        call[f"broadcast from {root}"] = lambda root=root: [
            ring.broadcast(torch.cat(pieces), rank, ranks, root=root)
        ]
    for name in call:
        yield name, call[name]
        assert all(map(torch.equal, pieces, pieces_of(rank, ranks))), f"{name} changes what it is given"


def each_collective_is_right(rank, ranks):
    of = [pieces_of(each, ranks) for each in range(ranks)]
    right = {"all_gather": [pieces[0] for pieces in of], "all_reduce": [sum(each) for each in zip(*of)]}
    right |= {"reduce_scatter": [right["all_reduce"][rank]], "all_to_all": [pieces[rank] for pieces in of]}
    right |= {f"broadcast from {root}": [torch.cat(of[root])] for root in range(ranks)}
    for name, call in calls(rank, ranks):
        due = {f"{name}: output {n}": each for n, each in enumerate(right[name])}
        builds.same(call(), due, "At entry [0, 0], rank r's piece n began with 100 r + 10 n.")


def each_message_goes_to_the_next_rank(rank, ranks):
    for name, call in calls(rank, ranks):
        sent = builds.messages(call)
        assert all(to == (rank + 1) % ranks for to, entries in sent), f"{name} sends past the next rank"


def no_message_is_too_many(rank, ranks):
    rounds = ranks - 1
    most = {
        "all_gather": (rounds, rounds),
        "reduce_scatter": (rounds, rounds),
        "all_reduce": (2 * rounds, 2 * rounds),
    }
    most |= {"all_to_all": (rounds, rounds * ranks / 2)}
    most |= {f"broadcast from {root}": (1, ranks) for root in range(ranks)}
    most[f"broadcast from {(rank + 1) % ranks}"] = 0, 0  # this rank is the last
    for name, call in calls(rank, ranks):
        sent = builds.messages(call)
        found = len(sent), sum(entries for to, entries in sent) / 6
        few = all(mine <= due for mine, due in zip(found, most[name]))
        assert few, f"{name} sends {found} messages and pieces, and {most[name]} are enough"


if __name__ == "__main__":
    builds.run(
        each_collective_is_right, each_message_goes_to_the_next_rank, no_message_is_too_many, ranks=(2, 3, 5)
    )
