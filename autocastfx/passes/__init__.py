"""Deciding (classify, place), rewriting and verifying; no pass knows another."""
