"""Reads the authors' checkpoints, which are whole pickled modules, without running anything that is in them.

A pickle names classes and functions that its reader is to call. Here a name either stands for one of a few functions
that make tensors and containers, or for a class of the authors' code, NVIDIA's or torch's own modules: then an inert
stub takes its place, which keeps its attributes and does nothing. Any other name is refused before it is looked up.
"""

from __future__ import annotations

import pickle
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STUBBED = (
    "mem_transformer",
    "proj_adaptive_softmax",
    "adaptive_softmax",
    "log_uniform_sampler",
    "data_parallel",
    "data_utils",
    "vocabulary",
    "utils",
    "torch.nn.modules",
    "torch.nn.parallel",
    "torch.nn.backends",
)
"""Modules, with what lies in them, whose names are known and become stubs."""

STUBBED_NAMES = {
    ("argparse", "Namespace"),  # NVIDIA's arguments
    ("collections", "Counter"),  # in vocabularies
    ("collections", "defaultdict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    ("_codecs", "encode"),
    ("torch", "device"),
}
"""Single names that may stand in such files beside the weights; nothing of theirs is needed."""


ZIP = b"PK\x03\x04"


class ForbiddenName(pickle.UnpicklingError):
    """The file wants to call something that is neither known nor needed. Says its dotted name."""


class Inert:
    """Stands for an object of a class that is not loaded: keeps what was stored in it and does nothing."""

    dump_patches = False  # torch asks modules of the old format

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state

    def get(self, name: str, default: Any = None) -> Any:
        """A stored attribute; of torch modules also a parameter, buffer or submodule."""
        state = self.__dict__.get("state")
        if not isinstance(state, dict):
            return default
        for group in (state, *(state.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules"))):
            if isinstance(group, dict) and name in group:
                return group[name]
        return default

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Names and values of what torch's `state_dict` would hold."""
        hidden = self.get("_non_persistent_buffers_set", ())
        for kind in ("_parameters", "_buffers"):
            for name, tensor in (self.get(kind) or {}).items():
                if isinstance(tensor, Tensor) and not (kind == "_buffers" and name in hidden):
                    yield f"{prefix}{name}", tensor
        for name, module in (self.get("_modules") or {}).items():
            if isinstance(module, Inert):
                yield from module.tensors(f"{prefix}{name}.")


def load(path: Path) -> Any:
    """What a file of torch's holds, with stubs for all objects that are no tensors or containers.

    Raises:
        ForbiddenName: it names something else.
        Exception: it is damaged, in any way.
    """
    if tarfile.is_tarfile(path):
        raise pickle.UnpicklingError("PyTorch 0.1 wrote it, whose format is not read")
    if _is_program(path):
        raise pickle.UnpicklingError("it is a TorchScript archive: a program, not weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sources of modules, which are not looked at
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Restricted)


def _is_program(path: Path) -> bool:
    """Whether torch would take the file for TorchScript; asked of its own reader, which may find other names in a zip
    file than Python's."""
    with path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:
            return False
    return any(name.endswith("constants.pkl") for name in torch._C.PyTorchFileReader(str(path)).get_all_records())


class _Unpickler(pickle._Unpickler):
    """`find_class` is the only way from a pickle to anything that can be called.

    The one written in Python: its faster twin takes tens of GB where a damaged file names a far place to remember at.
    """

    def find_class(self, module: str, name: str) -> Any:
        stubs: dict[tuple[str, str], type[Inert]] = self.__dict__.setdefault("_stubs", {})
        if (make := _MAKERS.get((module, name))) is not None:
            return make
        known = (module, name) in STUBBED_NAMES
        if known or any(module == part or module.startswith(f"{part}.") for part in STUBBED):
            return stubs.setdefault((module, name), type(name, (Inert,), {"__module__": "stub"}))
        raise ForbiddenName(f"{module}.{name}")


class _Restricted:
    """What torch takes for the module `pickle`."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


class _Maker:
    """A function that a pickle may call but not change: torch may be led to write to a file that its name says."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: object) -> None:
        raise ForbiddenName("builtins.setattr")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: object) -> Tensor:
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _parameter(data: Tensor, *rest: object) -> Tensor:
    return data


_MAKERS: dict[tuple[str, str], Callable[..., Any] | torch.dtype] = {
    **{("torch", str(kind).removeprefix("torch.")): kind for kind in (torch.float16, torch.float32, torch.float64)},
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor"): _Maker(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Maker(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Maker(_parameter),
    ("torch.nn.parameter", "Parameter"): _Maker(_parameter),
}
