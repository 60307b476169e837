"""The formats in which files hold a model's weights, one class each.

`registry.FORMATS` lists them. A format describes itself, recognizes its checkpoints, says which
of its variants it does not read, and turns the tensors of a file into plain weights.
"""
