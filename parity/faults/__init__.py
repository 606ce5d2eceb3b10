"""Planted faults: how ports go wrong, as data. Each is planted alone into an otherwise green port.

A fault of the runtime replaces something on one pipeline object; a fault of a graph rewrites a file in a copy of the
exported model folder. `expected` is the id that the suite must name as the first red one, in pipeline order.
"""

from parity.faults import binding, glue, params, pictures, reference, tables, text, weights
from parity.faults.port import Fault, Floats, Port, copy_model, edit_weights

FAULTS: tuple[Fault, ...] = (
    *reference.FAULTS,
    *pictures.FAULTS,
    *text.FAULTS,
    *tables.FAULTS,
    *glue.FAULTS,
    *weights.FAULTS,
    *params.FAULTS,
    *binding.FAULTS,
)

__all__ = ["FAULTS", "Fault", "Floats", "Port", "copy_model", "edit_weights"]
