"""Importable dummies for packages that SGLang imports at module level and a CPU server never uses.

The finder stands last on sys.meta_path, so a package that is really installed wins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = frozenset({"torchvision", "sgl_kernel"})


class _AnyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return dummy(name)


class _Anything(metaclass=_AnyClass):
    """A class, a decorator, a function and an instance, all at once."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def dummy(name: str) -> type:
    return _AnyClass(name, (_Anything,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = dummy(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module) -> None:
        pass


sys.meta_path.append(_Finder())
