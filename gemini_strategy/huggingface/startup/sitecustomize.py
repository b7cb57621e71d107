# Python imports this when it starts, in every process that comes of `gemini-strategy run`, which puts this folder first
# on PYTHONPATH. It puts the layer in place when a module is imported in which the layer replaces a class.
#
# Invariants
#   1. A process that imports none of these modules pays for a look at the name of what it imports, and imports nothing.
#   2. Any Python can run this file: of another version, or without Gemini. It then trains as it would have.
#   3. The sitecustomize that this one stands before is run too, and sees a sys.path without this folder.

import os
import sys

# The modules of huggingface/install.py.
MODULES = (
    "accelerate.accelerator",
    "peft.peft_model",
    "transformers.modeling_utils",
    "transformers.training_args",
    "transformers.trainer",
)


class _Finder(object):  # noqa: UP004
    """Finds no module by itself; before the first of MODULES is found, the layer is put in place."""

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        _begin()
        for finder in list(
            sys.meta_path
        ):  # the layer's among them, which the import that asks does not see
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def _begin():
    import importlib.util
    import json

    try:
        told = json.loads(os.environ["GEMINI_RUN"])
        is_ours, folder = told["prefix"] == sys.prefix, told["package"]
    except (KeyError, TypeError, ValueError):
        return
    if not is_ours:
        return
    if (
        "gemini_strategy" not in sys.modules
    ):  # the runner's own, wherever this process looks for modules
        spec = importlib.util.spec_from_file_location(
            "gemini_strategy",
            os.path.join(folder, "__init__.py"),  # noqa: PTH118
            submodule_search_locations=[folder],
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["gemini_strategy"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["gemini_strategy"]
            raise
    from gemini_strategy.huggingface.install import install

    install()


def _next():
    """Runs the sitecustomize that Python would have imported without this one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    mine = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)


if "GEMINI_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
_next()
