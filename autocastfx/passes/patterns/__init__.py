"""Formulas that models write out, and the operators that compute the same."""
