"""Programs that are not right yet, and what is known of each. `make test` leaves them out, report.py does not."""

UNSETTLED = {
    "flow/several threads evaluate": "one thread at a time: hooks are each thread's own, a net's frames are not",
    "func/linearize": "torch 2.11: the program runs under a mode that knows parameters by their class",
    "export/make_fx of p": "ends after a minute",
    "grad write/numpy": "the array is read-only, and NumPy's error names no parameter",
    "grad/dlpack": "refused by name: what is written there would be lost",
    "grad/safetensors": "refused by name: it takes an address",
    "optimizer/state_dict written": "a managed optimizer's state_dict() has copies of the moments",
    "read/safetensors of parameters": "each takes an address and keeps its chunk: no room at the least budget",
}
