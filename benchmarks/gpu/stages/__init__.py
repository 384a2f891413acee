"""The stages of ``benchmarks.gpu``: each module has a function that yields the rows of a stage."""
