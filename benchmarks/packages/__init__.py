"""How models of packages from the registry run, converted by each way.

A module of :mod:`benchmarks.packages.cases` makes the models of a package, small and with random weights; nothing is
downloaded. ``benchmarks/packages/requirements.txt`` says which versions, and how to install them beside this package.
"""
