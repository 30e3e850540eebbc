"""The state and the groups of two optimizers as one: what is written to them reaches the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NoReturn

from ..errors import UsageError

State = defaultdict[Any, Any]


class PairState(MutableMapping[Any, Any]):
    """The states of Muon and AdamW, live: an entry set, dropped or read here is theirs.

    ``is_new`` says whether nothing has been stepped or loaded: then there seems to be no entry, though each
    can be asked for. By that, ``torch.distributed.checkpoint`` tells an optimizer whose state has yet to be
    made, and makes it: a state of Muon's alone would leave AdamW's moments out of what is loaded.
    """

    def __init__(
        self, muon: State, adamw: State, is_adamws: Callable[[Any], bool], is_new: Callable[[], bool]
    ) -> None:
        self.muon, self.adamw, self.is_adamws, self.is_new = muon, adamw, is_adamws, is_new

    def _home(self, param: Any) -> State:
        if param in self.adamw:
            return self.adamw
        return self.muon if param in self.muon or not self.is_adamws(param) else self.adamw

    def __getitem__(self, param: Any) -> Any:
        """An entry, made if there is none, as of any optimizer's state."""
        return self._home(param)[param]

    def __setitem__(self, param: Any, entry: Any) -> None:
        self._home(param)[param] = entry

    def __delitem__(self, param: Any) -> None:
        del self._home(param)[param]

    def __contains__(self, param: object) -> bool:
        return not self.is_new() and param in self._home(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.is_new() else [*self.muon, *self.adamw])

    def __len__(self) -> int:
        return 0 if self.is_new() else len(self.muon) + len(self.adamw)

    def get(self, param: Any, default: Any = None) -> Any:
        """An entry, or ``default``."""
        return self._home(param)[param] if param in self else default

    def clear(self) -> None:
        """Drop all entries."""
        self.muon.clear()
        self.adamw.clear()

    def copy(self) -> State:
        """The same entries in a dictionary of its own, as any optimizer's state is."""
        return defaultdict(dict, self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is what ``copy`` returns: it is no longer the state of two optimizers."""
        return defaultdict, (dict, dict(self.items()))

    def __repr__(self) -> str:
        return f"PairState({dict(self.items())!r})"


class PairGroups(list[dict[str, Any]]):
    """The groups of both optimizers in one list, made at each look: the groups may be written to, it not."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this list is made anew whenever param_groups is read, and what is done to it reaches neither "
            "optimizer: write to its groups, set optimizer.param_groups whole, or call add_param_group()"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a plain list: the caller's own."""
        return list, (list(self),)

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
