"""Grammars: what an answer must be (``StructuredOutputs``) becomes, token by token, the set of ids that may follow.

llguidance does the work; here it is given bounds, and a language that it can't hold to exactly is refused. Masks are
host arrays: no jax comes in here, and nothing here knows of requests or steps.
"""

from jaxcb.grammar.compiler import Grammar, GrammarCompiler
from jaxcb.grammar.constraint import Constraint, Masks

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "Masks"]
