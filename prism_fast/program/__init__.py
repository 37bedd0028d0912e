"""The model as data: a bundle's forward as a checked list of operators, which this package's executor runs on text.

`format` (the file), `operators` (the allow-list) and `sizes` need no torch. `capture` is the only module that may see a
bundle's code; `runnable` is the only one that may see text. Nothing is imported here, so that either side pays only for
what it uses.
"""
