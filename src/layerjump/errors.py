"""What can go wrong, as a tree. Catch `LayerjumpError` to catch everything this package raises on purpose.

    LayerjumpError
    ├── BadModel               the model given cannot be used
    │   ├── ModelNotFound      no such folder, file, hub id; or the hub cannot be reached
    │   ├── UnsupportedModel   its family is not in the table
    │   ├── SelfCheckFailed    its states do not reassemble to its own output
    │   └── NoPredictions      its head was not in the checkpoint, so it predicts nothing
    └── BadText                the text given cannot be used
        └── TextTooShort       fewer documents or tokens than asked for

Every message says what was given, what was wanted and what to do. The command line prints it as one line.
"""


class LayerjumpError(Exception):
    """The root of all errors raised on purpose."""


class BadModel(LayerjumpError):
    """The model given cannot be used."""


class ModelNotFound(BadModel):
    """There is no such folder, file or hub id, or the hub cannot be reached."""


class UnsupportedModel(BadModel):
    """The model's family is not in the table of `inputs/families.py`."""


class SelfCheckFailed(BadModel):
    """The captured states do not reassemble to the model's own output."""


class NoPredictions(BadModel):
    """Weights between the last level and the logits were missing from the checkpoint."""


class BadText(LayerjumpError):
    """The text given cannot be read, or an option about it makes no sense."""


class TextTooShort(BadText):
    """There are fewer documents or tokens than asked for."""
