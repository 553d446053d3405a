"""Imports modules of other people's code by name, or from the file that another process has imported."""

import os
import sys
from hashlib import sha1
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

MAIN = "__main__"
IN_RANK = "RLHF_RANK"  # set in the environment of rank processes: they import a person's file, but do not run its flow


def importable(name: str) -> tuple[str, str]:
    """Return the name and the file with which another process can import a module of this process.

    The file is empty for a module without a file, and for the modules of this package, which every process finds. A
    script that runs is known by its file's name.

    >>> importable("sys")
    ('sys', '')
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or name.partition(".")[0] == __name__.partition(".")[0]:
        return name, ""
    return Path(file).stem if name == MAIN else name, str(Path(file).absolute())


def import_from(name: str, file: str = "") -> ModuleType:
    """Import a module by its name; with `file`, that very file, even if another module has the name.

    The folder of the import is first on the path from then on, as it is for a script, so modules in the same folder are
    found too. Raises what the import raises.
    """
    if not file:
        return import_module(name)
    folder = import_folder(name, file)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    named_after_file = f"_{sha1(file.encode()).hexdigest()[:16]}_{Path(file).stem}"
    for known in (name, MAIN, named_after_file):
        if _is_from(getattr(sys.modules.get(known), "__file__", None), file):
            return sys.modules[known]
    if name not in sys.modules and _is_found(name, file):
        return import_module(name)
    return _load(named_after_file if name in sys.modules else name, file)


def import_folder(name: str, file: str) -> str:
    """Return the folder that is on the path if `file` is imported as `name`: the folder above its packages.

    >>> import_folder("mine.losses", "/home/me/mine/losses.py"), import_folder("a_name_of_prefects", "/home/me/rloo.py")
    ('/home/me', '/home/me')
    """
    path, packages = Path(file), name.split(".")
    if path.name == "__init__.py":
        path = path.parent
    beneath = path.with_suffix("").parts[-len(packages) :]
    return str(path.parents[len(packages) - 1] if list(beneath) == packages else path.parent)


def _is_found(name: str, file: str) -> bool:
    """Whether the path leads from this name to this file."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # its parent is missing, or is no package
        return False
    return spec is not None and _is_from(spec.origin, file)


def _is_from(origin: str | None, file: str) -> bool:
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def _load(name: str, file: str) -> ModuleType:
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file", name=name, path=file)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
