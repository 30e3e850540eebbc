"""Files of results: Markdown for people, JSON for programs, both with what they were read on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muon_tutorial.evidence.tables import Table
from scripts.files import write_whole


def write_results(
    folder: Path,
    title: str,
    opening: str,
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    markdown: str,
    data: str,
    pictures: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Write what was measured: Markdown for people, JSON for programs, under two names.

    ``facts`` say what it was read on; ``pictures`` are files beside it, with what they show; ``more`` goes
    into the JSON alone.

    Raises:
        UsageError: a file cannot be written.
    """
    said = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    shown = "".join(f"![{what}]({name})\n\n" for name, what in (pictures or {}).items())
    body = "\n".join(table.markdown() for table in tables)
    write_whole(folder / markdown, f"# {title}\n\n{opening}\n\n{said}\n\n{shown}{body}")
    held = {"facts": facts, **more, "tables": [table.data() for table in tables]}
    write_whole(folder / data, json.dumps(held, indent=1, ensure_ascii=False) + "\n")
