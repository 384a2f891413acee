"""Operators that converted graphs call."""
