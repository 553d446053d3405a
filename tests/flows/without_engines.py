"""The command line where torch, Megatron and vLLM are not installed: python -m tests.flows.without_engines WORDS."""

import sys
from importlib.machinery import PathFinder


class WithoutEngines(PathFinder):
    """Finds what is installed but for the engines."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        engine = fullname.partition(".")[0] in ("torch", "megatron", "vllm")
        return None if engine else PathFinder.find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutEngines
    from prefect_rlhf.flows.commands.cli import main

    sys.exit(main(sys.argv[1:]))
