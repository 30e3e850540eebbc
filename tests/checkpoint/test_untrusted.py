"""Forged files and messages: nothing in them is executed, and no file outside the folder is opened.

The forger knows the format: sizes and hashes are right, and only the content is malicious.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_tutorial.checkpoint import load_checkpoint, manifest, save_checkpoint
from muon_tutorial.checkpoint.plain_data import pack, unpack
from muon_tutorial.errors import CheckpointError

from .models import bits, fresh, same, trained

Content = dict[str, Any]


class Reduced:
    """An object whose pickle calls a function with arguments, and may give the result a state."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduction


class Subclass(OrderedDict):
    """A class that no reader knows, with a state that runs code."""

    def __setstate__(self, state: Any) -> None:
        os.mkdir(state)


def gadgets(canary: Path) -> dict[str, Any]:
    """Objects that make a folder when a careless reader unpickles them."""
    act = Reduced(os.mkdir, (str(canary),))
    return {
        "a call": act,
        "eval": Reduced(eval, (f"__import__('os').mkdir({str(canary)!r})",)),
        "nested": {"a": [(1, {"b": act})]},
        "in the arguments of an allowed call": Reduced(OrderedDict, ([("a", act)],)),
        "in the state of an allowed class": Reduced(OrderedDict, (), {"a": act}),
        "in the items of an allowed class": Reduced(OrderedDict, (), None, None, iter([("a", act)])),
        "as the hooks of a tensor": Reduced(
            torch._utils._rebuild_tensor_v2, (torch.zeros(2)._typed_storage(), 0, (2,), (1,), False, act)
        ),
        "the state of another class": Reduced(Subclass, (), str(canary)),
        "a map that a list runs": Reduced(list, (Reduced(map, (os.mkdir, [str(canary)])),)),
        "a pickle inside": Reduced(pickle.loads, (pickle.dumps(act, protocol=2),)),
    }


GADGETS = tuple(gadgets(Path("canary")))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "saved", *trained(2), extra={"step": 2})
    return tmp_path / "saved"


def forge(folder: Path, change: Callable[[Content], object] = lambda content: None) -> None:
    """Change the manifest, and make sizes and hashes match the files in the folder."""
    path = folder / manifest.NAME
    content = json.loads(path.read_bytes())["manifest"]
    for file in folder.iterdir():
        if file != path and file.is_file():
            data = file.read_bytes()
            content["files"][file.name] = {"bytes": len(data), "sha256": manifest.sha256(data)}
    change(content)
    path.write_bytes(manifest.sealed(content))


def tensor_of(content: Content, key: str = "model.one") -> Content:
    return content["tensors"][key]


def box_of(content: Content, key: str = "model.one") -> Content:
    return tensor_of(content, key)["boxes"][0]


def put_in_place_of(folder: Path, key: str, data: bytes) -> None:
    """Replace the first box of a tensor by a separate file with these bytes."""
    (folder / "evil.distcp").write_bytes(data)
    forge(folder, lambda content: box_of(content, key).update(file="evil.distcp", start=0, bytes=len(data)))


def zipped(data: bytes) -> bytes:
    """A pickle inside a zip, where ``torch.load`` looks for it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def assert_refused(folder: Path, complaint: str) -> None:
    model, both = fresh()
    before = bits(model, both)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_checkpoint(folder, model, both)
    assert "\n" not in str(caught.value)
    assert same(before, bits(model, both))


@pytest.mark.parametrize("name", GADGETS)
@pytest.mark.parametrize("place", [".metadata", "tensor", "raw tensor", "extra", "raw extra"])
def test_nothing_is_executed(saved: Path, tmp_path: Path, place: str, name: str) -> None:
    canary = tmp_path / "canary"
    evil = pickle.dumps(gadgets(canary)[name], protocol=2)
    if place == ".metadata":
        (saved / ".metadata").write_bytes(evil)
        forge(saved)
        assert load_checkpoint(saved, *fresh()) == {"step": 2}
    elif place.endswith("extra"):
        (saved / "extra.pt").write_bytes(zipped(evil) if place == "extra" else evil)
        forge(saved)
        assert_refused(saved, r"extra\.pt (cannot be read|holds)")
    else:
        put_in_place_of(saved, "model.one", zipped(evil) if place == "tensor" else evil)
        assert_refused(saved, r"evil\.distcp (cannot be read|does not hold)|in \d+ bytes of evil")
    assert not canary.exists()


def test_the_gadgets_act_where_they_are_let(tmp_path: Path) -> None:
    """If the gadgets were harmless, the tests here would show nothing."""
    for number, name in enumerate(GADGETS):
        with contextlib.suppress(TypeError, AttributeError):
            pickle.loads(pickle.dumps(gadgets(tmp_path / str(number))[name], protocol=2))
        assert (tmp_path / str(number)).exists(), name


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/f", "..", "", "manifest.json", "a\0b"])
@pytest.mark.parametrize("where", ["box", "files"])
def test_no_name_leads_outside(saved: Path, name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(content: Content) -> None:
        if where == "files":
            content["files"][name] = {"bytes": 5, "sha256": "0" * 64}
        else:
            box_of(content).update(file=name)

    forge(saved, change)
    with opened_files(monkeypatch) as seen:
        assert_refused(saved, "the file name .*, which leads out of the folder")
    assert set(seen) == {"manifest.json"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("extra.pt", kind) for kind in ("link to a file", "link to a folder", "folder", "pipe")]
    + [("manifest.json", "link to a file"), ("manifest.json", "folder")],
)
def test_only_plain_files_are_opened(
    saved: Path, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved / name
    (tmp_path / "outside").write_bytes(target.read_bytes())
    target.unlink()
    if kind == "link to a file":
        target.symlink_to(tmp_path / "outside")
    elif kind == "link to a folder":
        target.symlink_to(tmp_path)
    elif kind == "folder":
        target.mkdir()
    else:
        os.mkfifo(target)
    with opened_files(monkeypatch) as seen:
        assert_refused(saved, "manifest.json" if name == "manifest.json" else "extra.pt is not a plain file")
    assert set(seen) == {"manifest.json"}


@contextlib.contextmanager
def opened_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that are opened in a checkpoint's folder."""
    seen: list[str] = []
    real = os.open

    def noting(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> int:
        if dir_fd is not None:
            seen.append(path)
        return real(path, *args, dir_fd=dir_fd, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", noting)
        yield seen


def group_of(content: Content) -> Content:
    return content["groups"]["one"]["group"]


CLAIMS: dict[str, tuple[Callable[[Content], object], str]] = {
    "more elements than bytes": (
        lambda content: [it.update(shape=[1 << 40, 3]) for it in (tensor_of(content), box_of(content))],
        "which cannot hold it",
    ),
    "a box behind the file": (lambda content: box_of(content).update(start=1 << 40), "which cannot hold it"),
    "a box of an unlisted file": (lambda content: box_of(content).update(file="x"), "in the unlisted file"),
    "a box outside": (lambda content: box_of(content).update(offset=[1, 0]), "outside its shape"),
    "a box missing": (lambda content: tensor_of(content)["boxes"].clear(), "do not make up"),
    "a box of other dimensions": (lambda content: box_of(content).update(offset=[0]), "outside its shape"),
    "a negative size": (lambda content: box_of(content).update(bytes=-1), "bytes or elements: -1"),
    "a truth value": (lambda content: box_of(content).update(start=True), "bytes or elements: True"),
    "a fraction": (lambda content: box_of(content).update(start=0.5), "bytes or elements: 0.5"),
    "a text as shape": (lambda content: box_of(content).update(shape="12"), "a wrong shape: '12'"),
    "no dtype": (lambda content: tensor_of(content).update(dtype="load"), "unknown dtype"),
    "another dtype": (lambda content: tensor_of(content).update(dtype="int32"), "saved as"),
    "no key": (lambda content: content.pop("tensors"), "has unexpected content: KeyError"),
    "tensors as a list": (lambda content: content.update(tensors=[]), "has unexpected content"),
    "another format": (lambda content: content["format"].update(name="x", version=9), "this version reads"),
    "a strange state": (lambda content: content["groups"]["one"].update(state=["../x"]), "has a state"),
    "params in a group": (lambda content: group_of(content).update(params=[1]), r"\['params'\] among"),
    "a value of no kind": (lambda content: group_of(content).update(lr={"call": []}), "of the kind 'call'"),
}


def test_boxes_that_overlap_and_leave_a_hole_are_refused(saved: Path) -> None:
    """The number of elements is right, but a load would leave zeros in the hole."""
    half = io.BytesIO()
    torch.save(torch.ones(2, 3), half)
    put_in_place_of(saved, "model.one", half.getvalue())

    def twice(content: Content) -> None:
        box_of(content).update(shape=[2, 3])
        content["tensors"]["model.one"]["boxes"].append({**box_of(content), "offset": [1, 0]})

    forge(saved, twice)
    assert_refused(saved, r"boxes of model\.one overlap, and do not cover all of it")


@pytest.mark.parametrize(("change", "complaint"), CLAIMS.values(), ids=CLAIMS)
def test_a_false_claim_is_refused(saved: Path, change: Callable[[Content], object], complaint: str) -> None:
    forge(saved, change)
    assert_refused(saved, complaint)


def test_deep_nesting_is_refused(saved: Path) -> None:
    body = b"[" * 100_000 + b"]" * 100_000
    data = manifest.sealed({})
    start, end = data.index(b"{}"), data.index(b"{}") + 2
    data = data[:start] + body + data[end:]
    data = data.replace(manifest.sha256(b"{}").encode(), manifest.sha256(body).encode())
    (saved / manifest.NAME).write_bytes(data)
    assert_refused(saved, "has unexpected content: RecursionError")


def test_a_compressed_tensor_is_not_unpacked(saved: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(4, 3), buffer)
    packed = io.BytesIO()
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in plain.infolist():
            archive.writestr(entry.filename, plain.read(entry))
    put_in_place_of(saved, "model.one", packed.getvalue())
    assert_refused(saved, "it is compressed")


@pytest.mark.parametrize(
    "value",
    [torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.int32), [1, 2], torch.zeros(4, 3).to_sparse()],
    ids=["shape", "dtype", "no tensor", "sparse"],
)
def test_a_tensor_other_than_the_manifest_says_is_refused(saved: Path, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    put_in_place_of(saved, "model.one", buffer.getvalue())
    assert_refused(saved, "does not hold what manifest.json says")


UNSAVEABLE: list[tuple[Any, str]] = [
    ({"a": {"b": [1, print]}}, r"extra\['a'\]\['b'\]\[1\] is a builtin_function_or_method"),
    ({"f": lambda: 0}, r"extra\['f'\] is a function"),
    ({"p": Path("x")}, r"extra\['p'\] is a pathlib\.\w*\.?PosixPath"),
    ({"g": Reduced(print, ("x",))}, r"extra\['g'\] is a tests\.\S+\.Reduced"),
    ({"m": torch.nn.Linear(1, 1)}, r"extra\['m'\] is a torch\.nn\.\S+\.Linear"),
]


@pytest.mark.parametrize(("value", "complaint"), UNSAVEABLE)
def test_objects_that_could_run_code_are_not_saved(tmp_path: Path, value: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        save_checkpoint(tmp_path / "a", *trained(1), extra=value)
    assert not any(tmp_path.iterdir())


def test_everything_that_resuming_needs_can_be_saved(tmp_path: Path) -> None:
    import random

    from torch.optim import lr_scheduler as schedulers

    model, both = trained(2)
    plans = {
        "lambda": schedulers.LambdaLR(both, lambda step: 0.5),
        "one cycle": schedulers.OneCycleLR(both.adamw, 0.1, total_steps=5),
        "plateau": schedulers.ReduceLROnPlateau(both.adamw),
        "in turn": schedulers.SequentialLR(
            both, [schedulers.LinearLR(both), schedulers.CosineAnnealingLR(both, 5)], [1]
        ),
    }
    extra: dict[str, Any] = {
        "schedulers": {name: plan.state_dict() for name, plan in plans.items()},
        "rng": (torch.get_rng_state(), random.getstate(), torch.Generator().manual_seed(3).get_state()),
        "step": 3,
        "losses": [1.5, float("inf")],
        "position": {"file": "a.txt", "offset": 1 << 80, "seen": {1, 2}},
    }
    save_checkpoint(tmp_path / "a", model, both, extra=extra)
    found = load_checkpoint(tmp_path / "a", *fresh())
    assert found.keys() == extra.keys()
    assert found["schedulers"] == extra["schedulers"]
    assert found["rng"][1] == extra["rng"][1]
    assert torch.equal(found["rng"][0], extra["rng"][0])
    assert found["position"] == extra["position"]


# --- messages between ranks ---------------------------------------------------------------------------------


def test_messages_arrive_as_they_were_and_objects_are_not_sent() -> None:
    message = {(0, 1): ["a", {"x"}, None, True, 0.1, float("inf")], "b": (2,)}
    assert unpack(pack(message)) == message
    with pytest.raises(CheckpointError, match="is a Reduced, which a checkpoint cannot hold"):
        pack([Reduced(print, ("x",))])


EXITS = pickle.dumps(Reduced(exec, ("raise SystemExit('executed')",)))


@pytest.mark.parametrize(
    "data",
    [
        EXITS,
        zlib.compress(EXITS),
        zlib.compress(b'{"Popen": {"args": "true"}}'),
        zlib.compress(b'{"tuple": 1}'),
        zlib.compress(b"[" * 10**6),
        zlib.compress(b"{}"),
        zlib.compress(bytes(1000))[:-8],
    ],
)
def test_a_message_that_no_rank_wrote_is_one_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="the ranks' store holds a value that no rank wrote"):
        unpack(data)
