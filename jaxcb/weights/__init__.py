"""Models from disk: finds a model's files, turns foreign formats into them, and loads the params pytree.

Everything that knows a file format lives here. Nothing here runs a model.
"""

from jaxcb.weights.loader import LoadedModel, default_dtype, load, load_params
from jaxcb.weights.resolve import ModelFiles, resolve

__all__ = ["LoadedModel", "ModelFiles", "default_dtype", "load", "load_params", "resolve"]
