"""Modules as those of benchmarks.packages.cases, for its test."""
