"""Shows two optimizers' states and groups as if a single optimizer had them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

from ..errors import UsageError

State = defaultdict[Any, Any]


class PairState(MutableMapping[Any, Any]):
    """A live view of Muon's and AdamW's states: reads, writes and deletions go through to them.

    As long as ``is_new()`` is true (nothing has been stepped or loaded), the state looks empty, though its
    entries can be read. The reason is ``torch.distributed.checkpoint``: before a load, it makes an
    optimizer's state if the state looks empty. If it found only Muon's state, it would leave AdamW's
    unmade and unloaded.
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
        """Return an entry. A missing entry is created, as in any optimizer's state."""
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
        return self._home(param)[param] if param in self else default

    def clear(self) -> None:
        self.muon.clear()
        self.adamw.clear()

    def copy(self) -> State:
        return defaultdict(dict, self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """The method ``copy``, ``copy.copy`` and pickling all give a plain defaultdict."""
        return defaultdict, (dict, dict(self.items()))

    def __repr__(self) -> str:
        return f"PairState({dict(self.items())!r})"


class PairGroups(list[dict[str, Any]]):
    """The groups of both optimizers. Every access makes a new list, so change the groups, not the list."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "param_groups is a new list at each access, and changes to it reach neither optimizer: change "
            "its groups, assign optimizer.param_groups, or call add_param_group()"
        )

    def __setitem__(self, place: Any, groups: Any) -> None:
        """Accept only the groups that are in the list already, because DeepSpeed assigns these."""
        if place != slice(None) or [*map(id, groups)] != [*map(id, self)]:
            self._refuse()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copying or pickling gives a plain list, which may be changed."""
        return list, (list(self),)

    __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
